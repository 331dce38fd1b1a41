"""How a server is started and ended by what surrounds it: closed standard files, signals."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.support.process import HANGS_S, ROOT, environment, run_cli

SERVE = f"{sys.executable} -m server.cli serve --listen 127.0.0.1:0 --model scripted"


def default_signals() -> None:
    """Tests that run in the background have inherited that these are ignored."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def started(command: str, **options: int) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(
        ["/bin/sh", "-c", f"exec {command}"],
        cwd=ROOT,
        env=environment(),
        preexec_fn=default_signals,
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def address_of(process: "subprocess.Popen[bytes]") -> str:
    """Where it listens, once it does."""
    found = psutil.Process(process.pid)
    for _ in range(2000):
        for connection in found.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return f"127.0.0.1:{connection.laddr.port}"
        assert process.poll() is None, process.returncode
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    raise AssertionError("it does not listen")


def healthy(address: str) -> bool:
    return any(run_cli("healthcheck", "--target", address).returncode == 0 for _ in range(4))


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&- >&-", "<&- >&- 2>&-"])
def test_a_server_with_closed_standard_files_serves_and_ends_in_order(closed: str) -> None:
    with started(f"{SERVE} {closed}") as process:
        assert healthy(address_of(process))
        for number in range(2 if "2>" not in closed else 3):
            if f"{'<' if number == 0 else '2>' if number == 2 else '>'}&-" in closed:
                assert os.readlink(f"/proc/{process.pid}/fd/{number}") == os.devnull
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_losing_the_terminal_drains_and_ends_in_order(number: signal.Signals) -> None:
    with started(SERVE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready on ")
        process.send_signal(number)
        assert process.wait(HANGS_S) == 0


@pytest.mark.slow
def test_a_server_that_is_to_outlive_its_terminal_does() -> None:
    with started(f"nohup {SERVE}", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready on ")
        process.send_signal(signal.SIGHUP)
        assert healthy(address_of(process))
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 0


@pytest.mark.slow
def test_a_ready_line_that_nobody_reads_ends_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with started(f"{SERVE} --log-level warning", stdout=writing) as process:
        os.close(writing)
        assert healthy(address_of(process))
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 0
