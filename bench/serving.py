"""``vorrang serve`` in a process of its own, for benchmarks that call it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that is ready; ``ready_s`` is how long that took."""

    address: str
    pid: int
    ready_s: float


def free_port() -> int:
    """A port of loopback that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def serving(*options: str, settings: Mapping[str, object] | None = None) -> Iterator[Serving]:
    """A server until the context is left, of the default model unless it is told otherwise.

    Args:
        options: of ``vorrang serve``.
        settings: further settings by path, such as ``kv.num_blocks``.
    """
    command = [sys.executable, "-m", "server.cli", "serve", "--listen", "127.0.0.1:0", *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    for path, value in (settings or {}).items():
        environment[f"VORRANG_{path.upper().replace('.', '__')}"] = str(value)
    begin = time.perf_counter()
    with subprocess.Popen(  # noqa: S603
        [*command, "--log-level", "error"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready on "), line
            address = line.removeprefix("ready on ").split(": ")[0]
            yield Serving(address, process.pid, time.perf_counter() - begin)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
