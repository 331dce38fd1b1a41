"""What the commands of ``vorrangctl`` share: options, exit codes, and how they fail.

Exit codes: 0 success, 1 the request, the server or the demo failed, 2 wrong
usage or a refused field, 130 Ctrl-C.
"""

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from clients.python.demo_server import ServerDied
from clients.python.errors import InvalidRequest, VorrangError
from timeline.printable import printable_lines
from timeline.secrecy import redacted
from workloads.errors import InvalidWorkload

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

DEFAULT_TARGET = "127.0.0.1:50051"
Target = Annotated[
    str, typer.Option("--target", envvar="VORRANG_TARGET", help="Address of the server, as HOST:PORT.")
]
Control = Annotated[
    str | None,
    typer.Option(
        "--control",
        envvar="VORRANG_CONTROL",
        help="Address of ControlService, where it has a port of its own.",
        show_default="that of --target",
    ),
]

Adapter = Annotated[
    str, typer.Option("--adapter", metavar="NAME", help="LoRA adapter of the model.", show_default="none")
]


class expected_failures:  # noqa: N801  # Reads as a statement where it is used.
    """Turns failures a user must expect into one line and an exit code."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        match error:
            case InvalidRequest():
                details = [f"{v.field}: {v.description}" for v in error.violations]
                _exit("; ".join(details) or str(error), EXIT_USAGE, error)
            case VorrangError() | ServerDied():
                _exit(str(error), EXIT_FAILED, error)
            case TimeoutError():
                _exit("took too long", EXIT_FAILED, error)
            case ValueError() | InvalidWorkload():
                _exit(str(error), EXIT_USAGE, error)
            case BrokenPipeError():
                # Whoever read the output has gone; keep the interpreter from trying again at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(EXIT_FAILED) from error
            case KeyboardInterrupt():
                _exit("interrupted", EXIT_INTERRUPTED, error)
            case asyncio.CancelledError():
                _exit("terminated", EXIT_TERMINATED, error)


def _exit(message: str, code: int, error: BaseException) -> None:
    sys.stderr.write(f"vorrangctl: {printable_lines(redacted(message))}\n")
    raise typer.Exit(code) from error


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run ``work`` to its end; Ctrl-C cancels it, which cancels its requests on the server."""
    with expected_failures():
        return asyncio.run(work)
