"""A server as a process of its own: ``python -m server.cli``."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support import canaries

ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which a program that is to end by itself hangs, however busy the machine.
HANGS_S = 100.0
_LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
os.execv(sys.argv[2], sys.argv[2:])
"""
_READY = re.compile(r"ready on (\S+:\d+): ")


@dataclass
class ServerProcess:
    """A server that has said it is ready."""

    process: "subprocess.Popen[str]"
    address: str
    ready_line: str

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    @property
    def runner(self) -> "psutil.Process | None":
        """The process that computes; None while there is none."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "engine.runner.worker" in child.cmdline():
                    return child
        return None

    def wait(self, timeout_s: float = 20) -> int:
        """The exit status."""
        return self.process.wait(timeout_s)


def children(pid: int | None = None) -> set[psutil.Process]:
    """Processes that a process has started, ours if none is named.

    Without the one in which Python counts what its ``multiprocessing`` shares; once started, it stays.
    """
    return {child for child in psutil.Process(pid).children() if "resource_tracker" not in command_of(child)}


def command_of(process: psutil.Process) -> str:
    """Its command line; "" of one that is gone or a zombie."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without the settings somebody may have exported, and with the repository's packages first."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("VORRANG_")}
    return {**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", **(extra or {})}


def run_cli(
    *arguments: str, timeout_s: float = HANGS_S, extra: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command that ends by itself."""
    command = [sys.executable, "-m", "server.cli", *arguments]
    return _run(command, environment(extra), timeout_s)


def run_python(code: str, *, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run code in a fresh interpreter."""
    result = _run([sys.executable, "-c", code], environment(), HANGS_S)
    assert not check or result.returncode == 0, result.stderr
    return result


def _run(command: list[str], env: dict[str, str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@contextlib.contextmanager
def server_process(
    *arguments: str,
    model: str | None = "scripted",
    log: Path | None = None,
    module: Sequence[str] = ("server.cli",),
    extra: Mapping[str, str] | None = None,
    open_files: int | None = None,
) -> Iterator[ServerProcess]:
    """A server on a free port, killed on the way out if it is still there; its log must hold no secret.

    Args:
        arguments: further ones of ``vorrang serve``.
        model: None = the default.
        log: file for its log; without one a pipe takes it, which nobody empties: 64 KiB are too many.
        module: what runs instead of ``server.cli``, with its own first arguments.
        extra: of the environment.
        open_files: descriptors that it may have, and can't raise.
    """
    command = [sys.executable, "-m", *module, "serve", "--listen", "127.0.0.1:0"]
    if open_files is not None:
        command = [sys.executable, "-c", _LIMITED, str(open_files), *command]
    with (
        contextlib.ExitStack() as stack,
        subprocess.Popen(
            [*command, *(() if model is None else ("--model", model)), *arguments],
            env=environment(extra),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if log is None else stack.enter_context(log.open("w")),
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = _READY.match(line)
            assert match, (line, process.stderr.read() if process.stderr and not line else "")
            yield ServerProcess(process, match[1], line)
        finally:
            process.kill()
            _, logged = process.communicate()
            canaries.check(log.read_text(errors="replace") if log is not None else logged, "the server's log")
