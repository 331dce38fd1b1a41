"""The page on ``vorrangctl``: every command and every program on it is run as it stands."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clients.python.cli import main
from tests.support.process import ROOT, ServerProcess, environment, server_process

PAGE = (ROOT / "docs/clients/cli.md").read_text()
COMMANDS = [
    line.removeprefix("$ vorrangctl ")
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
#: What each command says, by its beginning.
SAYS = {
    "generate": "tokens",
    "chat": "done",
    "load": "TTFT",
    "admin info": "scripted",
    "admin load": "seats",
    "admin requests --class": "alive",
    "admin requests --json": "server_request_id",
    "admin priority": "has level -10",
    "admin cancel": "is cancelled",
    "admin decisions": "blocks free",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("docs")
    config = folder / "slow.toml"
    config.write_text("[engine]\nscripted_step_s = 0.002\n[scheduler]\nmax_context_tokens = 4096\n")
    with server_process("--config", str(config), "--kv-blocks", "2048", log=folder / "log") as process:
        yield process


@pytest.fixture
def busy(server: ServerProcess) -> Iterator[str]:
    """The server's id of a request that takes long."""
    process = subprocess.Popen(
        [sys.executable, "-m", "clients.python.cli", "generate", "a", "--max-tokens", "4000"],
        env=environment({"VORRANG_TARGET": server.address}), cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        alive: list[dict[str, str]] = []
        while not alive:
            listed = run("admin requests --json", server)
            assert listed.exit_code == 0, listed.output
            alive = json.loads(listed.stdout)
        yield alive[0]["server_request_id"]
    finally:
        process.kill()
        process.wait()


def run(command: str, server: ServerProcess, stdin: str = "") -> Result:
    env = {"VORRANG_TARGET": server.address, "COLUMNS": "160"}
    return CliRunner().invoke(main, shlex.split(command), stdin, env)


def test_every_command_of_the_page_is_known_here() -> None:
    assert len(COMMANDS) == 14
    unknown = [c for c in COMMANDS if c != "top" and not c.startswith(tuple(SAYS))]
    assert not unknown


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(("admin", "top"))])
def test_it_does_what_the_page_says(
    command: str, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(command, server, "Hello\n/quit\n")
    assert result.exit_code == 0, result.output
    assert SAYS[command.split()[0]] in result.output
    assert [path.name for path in sorted(tmp_path.iterdir())] == (
        ["figures.json", "records.jsonl"] if "--json" in command else []
    )


def test_the_operators_commands_do_what_the_page_says(server: ServerProcess, busy: str) -> None:
    for command in (c for c in COMMANDS if c.startswith("admin")):
        result = run(command.replace("r17", busy), server)
        assert result.exit_code == 0, (command, result.output)
        (said,) = (text for start, text in SAYS.items() if command.startswith(start))
        assert said in result.output, command


def test_the_program_of_the_page_runs(server: ServerProcess) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program.replace("127.0.0.1:50051", server.address)],
        capture_output=True, text=True, timeout=30, check=False, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"0\.\d+ s to the first token\n", done.stdout)


def test_every_option_and_key_of_the_page_exists() -> None:
    help_text = CliRunner().invoke(main, ["load", "--help"], env={"COLUMNS": "200"}).output
    for option in re.findall(r"^\| (`--.*?) \|", PAGE, re.MULTILINE):
        for name in re.findall(r"--[a-z-]+", option):
            assert name in help_text, name
    source = (ROOT / "clients/python/top_app.py").read_text()
    for key in re.findall(r"`(\w)`", PAGE[PAGE.index("## top") : PAGE.index("## admin")]):
        assert f'Binding("{key}"' in source


def test_every_file_named_on_the_page_exists() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert ((ROOT / "docs/clients") / path).exists(), path
