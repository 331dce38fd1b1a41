"""CONTRIBUTING's recipes, done as they are written, in a copy of the repository."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import ROOT, environment

#: What a copy needs to compute: the folders that are imported, and the documents that tests read.
COPIED = ("docs/SCHEDULING.md", "pyproject.toml", "clients", "engine", "kernels", "kv", "protos", "report",
          "server", "tests", "timeline", "workloads")  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that git knows of, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard", "--", *COPIED, ":!clients/*/src"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).suffix in {".py", ".pyi", ".md", ".toml", ".json"} and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def insert(path: Path, before: str, text: str) -> None:
    """Put a text before another one, which the file has once."""
    was = path.read_text()
    assert was.count(before) == 1, f"{path}: {before!r} {was.count(before)} times"
    path.write_text(was.replace(before, text + before))


def done_in(copy: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not deep", *arguments],
        cwd=copy,
        env=environment({"PYTHONPATH": f"{copy}:{copy / 'protos'}"}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_a_policy(copy: Path) -> None:
    """Shortest prompt first inside a level; the random walk and its oracle take it up by themselves."""
    order = copy / "engine/scheduler/order.py"
    insert(
        order,
        "class FcfsPolicy(Policy):",
        '''class ShortestPolicy(Policy):
    """Level, then the length of the prompt, then arrival."""

    name = "shortest"

    def order(self, request: Request) -> tuple[int, ...]:
        """The length of the prompt."""
        return (request.num_prompt_tokens,)


''',
    )
    policies = copy / "engine/scheduler/policies.py"
    insert(policies, "PriorityPolicy\n", "ShortestPolicy, ")
    insert(policies, "PriorityPolicy, FairPolicy", "ShortestPolicy, ")
    forgotten = done_in(copy, "tests/tidy/test_registries.py").stdout
    for what in ("command_line_offers", "have_a_row_for_it[shortest]", "oracle_knows"):
        assert what in forgotten, f"nothing asks for what the recipe says: {what}"
    insert(copy / "server/cli.py", '    FCFS = "fcfs"\n', '    SHORTEST = "shortest"\n')
    insert(copy / "docs/SCHEDULING.md", "| `fair` |", "| `shortest` | level, then length | yes |\n")
    oracle = '    "shortest": lambda spec: (len(spec.prompt_token_ids),),\n'
    insert(copy / "tests/support/admissible.py", '    "priority": lambda spec: (),\n', oracle)
    walk = "tests/property/test_scheduler_walk.py"
    done = done_in(
        copy, "tests/tidy/test_registries.py", walk, "tests/unit/scheduler/test_scheduler_settings.py"
    )
    assert done.returncode == 0, done.stdout[-4000:]
    saw = "import engine.scheduler.policies as p; print(p.__file__, *p.POLICIES)"
    told = subprocess.run(
        [sys.executable, "-c", saw], cwd=copy, env=environment({"PYTHONPATH": str(copy)}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.split()[1:] == ["shortest", "priority", "fair", "fcfs"]
    assert told.stdout.startswith(str(copy))
