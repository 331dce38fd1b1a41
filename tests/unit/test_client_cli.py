"""What ``vorrangctl`` says and returns where no server is needed."""

import socket
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from clients.python import cli
from clients.python.demo import DemoOptions
from clients.python.demo_server import ServerDied


def ctl(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, env={"COLUMNS": "200"})


@pytest.fixture
def nobody() -> Any:
    """An address nobody listens at: bound, so that nobody else can take it, but not listening."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",)])
def test_no_server_is_one_line_and_exit_code_1(command: tuple[str, ...], nobody: str):
    result = ctl(*command, "--target", nobody)
    assert result.exit_code == 1
    assert result.stderr.startswith("vorrangctl: ")
    assert len(result.stderr.splitlines()) == 1
    assert nobody in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--seats", "4", "--batch", "2"),
        ("generate",),
        ("generate", "x", "--max-tokens", "0"),
        ("generate", "x", "--temperature", "hot"),
        ("generate", "x", "--logit-bias", "three"),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_code_2_before_anything_is_started(arguments: tuple[str, ...]):
    result = ctl(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("held", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_of_the_demo_is_its_verdict(monkeypatch: pytest.MonkeyPatch, held: bool, code: int):
    seen: list[DemoOptions] = []

    async def run_demo(options: DemoOptions, console: Any) -> bool:
        seen.append(options)
        return held

    monkeypatch.setattr(cli, "run_demo", run_demo)
    arguments = ("--batch", "7", "--interactive", "3", "--max-tokens", "50", "--seats", "2", "--threads", "1")
    assert ctl("demo", *arguments).exit_code == code
    assert seen == [DemoOptions(num_batch=7, num_interactive=3, num_seats=2, batch_tokens=50, num_threads=1)]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ServerDied("it ended:\nlast words"), 1, "vorrangctl: it ended:\nlast words\n"),
        (TimeoutError(), 1, "vorrangctl: took too long\n"),
        (KeyboardInterrupt(), 130, "vorrangctl: interrupted\n"),
    ],
)
def test_expected_failures_have_a_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
):
    def fail(work: Any) -> None:
        work.close()
        raise error

    monkeypatch.setattr(cli.asyncio, "run", fail)
    result = ctl("demo")
    assert (result.exit_code, result.stderr) == (code, message)


def test_a_bug_is_not_dressed_up_as_an_expected_failure(monkeypatch: pytest.MonkeyPatch):
    async def run_demo(options: DemoOptions, console: Any) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "run_demo", run_demo)
    assert isinstance(ctl("demo").exception, ZeroDivisionError)
