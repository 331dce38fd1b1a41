"""The documents: links lead somewhere, code runs, every page and every error is there."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from clients.python.errors import CLASS_BY_REASON, RequestFailed
from server.errors import TABLE
from server.identity import hash_of
from server.settings import load
from tests.support.process import ROOT, ServerProcess, environment, server_process
from vorrang.v1 import errors_pb2

DOCS = ROOT / "docs"
#: Folders that hold no documents of ours.
NOT_OURS = {"build", "target", "node_modules"}
REASONS = [name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()[1:]]
#: Reasons that the protocol has and no error of this server does.
NEVER_SENT = {"SLO_UNATTAINABLE", "PREEMPTION_LIMIT"}
HEAD = re.compile(r"`(\w+)`, ((?:not )?retryable)\. Python `(\w+)`, Go `(\w+)`, Java `Reason\.(\w+)`\.")


def documents() -> list[Path]:
    folders = [
        path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in NOT_OURS
    ]
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    return [path for path in sorted(found) if not NOT_OURS & set(path.relative_to(ROOT).parts)]


def text_without_code(path: Path) -> str:
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def anchors_in(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_without_code(path), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading.lower())) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def links_in(path: Path) -> list[str]:
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text_without_code(path))
    return [link for link in found if "://" not in link and not link.startswith("mailto:")]


def test_every_relative_link_leads_somewhere():
    broken = []
    for path in documents():
        for link in links_in(path):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and anchor not in anchors_in(target)):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert broken == []


def test_the_index_names_every_page():
    named = {(DOCS / link.partition("#")[0]).resolve() for link in links_in(DOCS / "README.md")}
    assert set(DOCS.rglob("*.md")) - named == {DOCS / "README.md"}


def test_every_make_target_named_in_the_documents_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"make ([a-z-]+)", (ROOT / document).read_text()))
        assert named <= targets | {"alone"}, document


def test_every_module_named_in_the_architecture_exists():
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.(?:py|go|cpp))`", (ROOT / "ARCHITECTURE.md").read_text()))
    folders = [
        "engine",
        "server",
        "clients",
        "kernels",
        "kv",
        "timeline",
        "workloads",
        "report",
        "tests",
        "bench",
        "tools",
    ]
    there = {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}
    assert len(named) > 100
    assert named <= there


def test_the_protocol_reference_is_what_the_protos_say():
    done = subprocess.run(
        [sys.executable, "tools/protocol_reference.py", "--check"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def sections() -> dict[str, str]:
    """Text on each reason in the page on errors."""
    text = (DOCS / "TROUBLESHOOTING.md").read_text().partition("## By reason")[2]
    parts = re.split(r"^### ([A-Z_]+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_error_has_a_section_and_nothing_else_has():
    assert list(sections()) == REASONS, "one ### section a reason, in the order of errors.proto"


@pytest.mark.parametrize("reason", REASONS)
def test_a_section_says_what_server_and_clients_make_of_the_error(reason):
    section = sections()[reason]
    match = HEAD.search(section)
    assert match, f"{reason}: the first line must be: `CODE`, [not ]retryable. Python `X`, Go `X`, Java `X`."
    code, retryable, python, go, java = match.groups()
    rows = [(cls, row) for cls, row in TABLE.items() if row.reason == reason]
    if reason in NEVER_SENT:
        assert not rows, "the server sends it now: say so"
        assert "does not send it" in section or "instead" in section
    else:
        assert {row.code.name for _, row in rows} == {code}
        assert {cls.retryable for cls, _ in rows} == {retryable == "retryable"}
    comment = re.search(rf"// ([A-Z_]+): (?:[^\n]*\n\s*// )*[^\n]*\n\s*ERROR_REASON_{reason} =", proto())
    assert comment, reason
    assert comment[1] == code
    assert CLASS_BY_REASON.get(reason, RequestFailed).__name__ == python
    assert re.search(rf'\b{go}\s+Reason = "{reason}"', (ROOT / "clients/go/errors.go").read_text())
    names = (ROOT / "clients/java/src/main/java/io/vorrang/client/Reason.java").read_text()
    assert java == reason
    assert re.search(rf"^  {reason}[,;]?$", names, re.MULTILINE)
    assert "**Cause**" in section
    assert "**What to do**" in section


def proto() -> str:
    return (ROOT / "protos/vorrang/v1/errors.proto").read_text()


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as process:
        yield process


@pytest.mark.parametrize("page", ["TROUBLESHOOTING.md", "KUBERNETES.md"])
def test_programs_in_the_pages_run(server, page):
    programs = fenced(page, "python")
    assert programs
    for program in programs:
        code = re.sub(r"(127\.0\.0\.1|localhost):50051", server.address, program)
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.mark.parametrize("page", ["OPERATIONS.md", "KUBERNETES.md"])
def test_settings_in_the_pages_are_settings(page, tmp_path):
    files = fenced(page, "toml")
    assert files or page != "OPERATIONS.md"
    for text in files:
        (tmp_path / "vorrang.toml").write_text(text.replace("sha256:...", hash_of("a-token-of-length")))
        load(tmp_path / "vorrang.toml").settings.scheduler_config  # noqa: B018


def test_settings_and_log_lines_named_in_the_pages_exist():
    sources = [path.read_text() for folder in ("server", "engine") for path in (ROOT / folder).rglob("*.py")]
    known = {described.path for described in load(None).describe()}
    sections_known = {path.partition(".")[0] for path in known} - {"tenants"}
    known |= {name for text in sources for name in re.findall(r'"([a-z]+\.[a-z_]+)"', text)}
    wrong = []
    for path in (
        DOCS / name for name in ("OPERATIONS.md", "TROUBLESHOOTING.md", "KUBERNETES.md", "PROTOCOL.md")
    ):
        for name in re.findall(r"`([a-z]+\.[a-z_]+)`", path.read_text()):
            if name.partition(".")[0] in sections_known and name not in known | chart_values():
                wrong.append(f"{path.name}: {name}")
    assert wrong == []


def test_variables_named_anywhere_are_settings():
    known = {described.path for described in load(None).describe()}
    files = [*documents(), ROOT / "Dockerfile", ROOT / "compose.yaml", ROOT / "tools/image.py"]
    wrong = []
    for path in files:
        for section, name in re.findall(r"\bVORRANG_([A-Z]+)__([A-Z_]+)\b", path.read_text()):
            if f"{section.lower()}.{name.lower()}" not in known:
                wrong.append(f"{path.relative_to(ROOT)}: VORRANG_{section}__{name}")
    assert wrong == []


def chart_values() -> set[str]:
    """Names of all values of the chart, with dots."""
    return set(_named(yaml.safe_load((ROOT / "deploy/helm/vorrang/values.yaml").read_text()), ""))


def _named(tree: Any, prefix: str) -> Iterator[str]:
    for name, value in tree.items() if isinstance(tree, dict) else ():
        yield prefix + name
        yield from _named(value, f"{prefix}{name}.")


def test_values_of_the_chart_named_in_its_page_exist():
    known = chart_values()
    settings = {f"config.{described.path}" for described in load(None).describe()}
    named = re.findall(r"`([a-z]\w+(?:\.\w+)+)`", (DOCS / "KUBERNETES.md").read_text())
    checked = [name for name in named if name.partition(".")[0] in known]
    assert len(checked) > 15
    assert [name for name in checked if name not in known | settings] == []


def test_the_figures_are_those_of_the_last_benchmark():
    done = subprocess.run(
        [sys.executable, "tools/figures.py", "--check"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
