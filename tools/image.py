"""Run the steps of the Dockerfile without a container engine, so that the file cannot rot.

Usage: ``make check-image``. Stage ``build`` runs in a scratch folder: ``/src`` and
``/opt/vorrang`` of the image are folders in it, COPY obeys ``.dockerignore``, RUN is run.
Then ``ENTRYPOINT`` and ``CMD`` of stage ``cpu`` are started with nothing on the PATH but
what the image would have, its ``HEALTHCHECK`` is asked, a client generates, and SIGTERM
must end it. What cannot be done here is said at the end. ``--borrow`` lets the scratch
environment see the packages of the running one, instead of installing some GB.
"""

import argparse
import asyncio
import contextlib
import fnmatch
import json
import os
import shlex
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[1]
PREFIX, CACHE = "/opt/vorrang", "/var/cache/vorrang"
READY_S_MAX, STOP_S_MAX, STEP_S_MAX = 120.0, 30.0, 1800.0


def main() -> None:
    """Lint, build, start, ask, stop."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--borrow", action="store_true", help="see the running environment's packages")
    options = parser.parse_args()
    subprocess.run([Path(sys.executable).with_name("hadolint"), "Dockerfile"], cwd=ROOT, check=True)
    print("hadolint: no findings")
    stages = stages_of(ROOT / "Dockerfile")
    with tempfile.TemporaryDirectory(prefix="vorrang-image-") as folder:
        image = Image(Path(folder), borrow=options.borrow)
        for step in stages["build"]:
            image.build(step)
        image.serve(stages["cpu"])
    users = [step["value"] for step in stages["cuda"] if step["instruction"] == "USER"]
    assert users[-1] == "10001", "cuda must not run as root"
    print("not checked here: " + "; ".join((*image.skipped, "the base image", "what stage cuda installs")))


def stages_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Steps of each named stage."""
    parsed: dict[str, list[dict[str, Any]]] = {}
    stage: list[dict[str, Any]] = []
    for step in DockerfileParser(fileobj=path.open("rb")).structure:
        if step["instruction"] == "FROM":
            stage = parsed.setdefault(step["value"].split()[-1], [])
        else:
            stage.append(step)
    return parsed


class Image:
    """The scratch folder that stands for an image."""

    def __init__(self, folder: Path, *, borrow: bool) -> None:
        self.folder = folder
        self.skipped: list[str] = []
        self._borrow = borrow
        self._workdir = folder
        self._arguments: dict[str, str] = {}

    def build(self, step: dict[str, Any]) -> None:
        """Carry out one step of stage ``build``."""
        value: str = step["value"]
        match step["instruction"]:
            case "ARG":
                name, _, default = value.partition("=")
                self._arguments[name] = os.environ.get(name, default.strip('"'))
            case "WORKDIR":
                self._workdir = self._inside(value)
                self._workdir.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = value.split()
                for source in sources:
                    copy(source, self._workdir / target)
            case "RUN" if value.startswith("apt-get"):
                self.skipped.append("packages of the base system")
            case "RUN":
                self._run(value)
            case "COMMENT":
                pass
            case other:
                raise SystemExit(f"stage build has a step this script does not know: {other}")

    def _run(self, command: str) -> None:
        """What is written for the image's folders happens in ours."""
        for path in (PREFIX, CACHE):
            command = command.replace(path, str(self._inside(path)))
        command = command.replace(" /src/", f" {self.folder}/src/")
        if self._borrow:
            command = command.replace("-m venv", "-m venv --system-site-packages")
        print(f"$ {command}", flush=True)
        environment = {**os.environ, **self._arguments}
        environment.pop("PYTHONPATH", None)
        subprocess.run(
            ["/bin/sh", "-ec", self._with_borrowed(command)],
            cwd=self._workdir,
            env=environment,
            check=True,
            timeout=STEP_S_MAX,
        )

    def _with_borrowed(self, command: str) -> str:
        """Right after the environment is made, the running one's packages are put behind its own."""
        if not self._borrow or "-m venv" not in command:
            return command
        make, rest = command.split("&&", 1)
        packages = self._inside(PREFIX) / f"lib/python3.{sys.version_info.minor}/site-packages/borrowed.pth"
        return f"{make} && printf '%s\\n' '{site.getsitepackages()[0]}' > {packages} && {rest}"

    def serve(self, steps: list[dict[str, Any]]) -> None:
        """Start what stage ``cpu`` starts, ask it, and stop it."""
        wanted = {step["instruction"]: step["value"] for step in steps}
        assert wanted["STOPSIGNAL"] == "SIGTERM"
        assert wanted["USER"] == "10001", "must not be root"
        runs = [step["value"] for step in steps if step["instruction"] == "RUN"]
        assert not [value for value in runs if "apt-get" in value], (
            "nothing is installed here, no compiler either"
        )
        port, health_port = free_ports(2)
        self.skipped += ["the user and the ownership of files", "restarts by HEALTHCHECK"]
        binaries = self._inside(PREFIX) / "bin"
        environment = {
            **variables(wanted["ENV"]),
            "PATH": str(binaries),
            "VORRANG_CACHE_DIR": str(self._inside(CACHE)),
            "VORRANG_SERVER__INSECURE": "true",
            "HOME": "/nonexistent",
        }
        for name in ("VORRANG_HEALTH__LISTEN", "VORRANG_HEALTHCHECK_TARGET"):
            environment[name] = environment[name].replace(":50053", f":{health_port}")
        command = json.loads(wanted["ENTRYPOINT"]) + json.loads(wanted["CMD"])
        command = [argument.replace("0.0.0.0:50051", f"127.0.0.1:{port}") for argument in command]
        health = json.loads(wanted["HEALTHCHECK"].split("CMD", 1)[1])
        print(f"$ {' '.join(command)}", flush=True)
        started = time.monotonic()
        with subprocess.Popen(
            [binaries / command[0], *command[1:]], env=environment, cwd="/", stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                while self._health(binaries, health, environment) != 0:
                    assert server.poll() is None, f"the server ended with {server.returncode}"
                    assert time.monotonic() - started < READY_S_MAX, "the server does not become healthy"
                    time.sleep(0.5)
                print(f"healthy after {time.monotonic() - started:.1f} s")
                text = asyncio.run(generate(f"127.0.0.1:{port}"))
                print(f"it says: {text!r}")
            finally:
                server.send_signal(signal.SIGTERM)
                status = server.wait(STOP_S_MAX)
            assert server.stdout is not None
            print(server.stdout.read().strip())
        assert status == 0, f"SIGTERM ended the server with {status}"
        assert self._health(binaries, health, environment) == 1, "a stopped server is called healthy"
        print("SIGTERM: drained, exit status 0; then unhealthy")

    @staticmethod
    def _health(binaries: Path, command: list[str], environment: dict[str, str]) -> int:
        done = subprocess.run(
            [binaries / command[0], *command[1:]], env=environment, cwd="/", capture_output=True, check=False
        )
        return done.returncode

    def _inside(self, path: str) -> Path:
        return self.folder / path.lstrip("/")


def copy(source: str, target: Path) -> None:
    """COPY from the repository, but for what ``.dockerignore`` keeps out."""
    path = ROOT / source
    assert is_sent(source), f".dockerignore keeps {source} out"
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            name = str(file.relative_to(ROOT))
            if file.is_file() and is_sent(name):
                to = target / file.relative_to(path)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, to)
    else:
        target = target / path.name if target.is_dir() or str(target).endswith(("/", ".")) else target
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def is_sent(name: str) -> bool:
    """Whether ``.dockerignore`` lets a file or folder pass; the last rule that matches decides."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text().split():
        pattern = rule.lstrip("!")
        parts = Path(name).parts
        prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
        elif rule.startswith("!"):
            matches = pattern in prefixes or pattern.startswith(f"{name}/")
        else:
            matches = any(fnmatch.fnmatch(prefix, pattern) for prefix in prefixes[:1])
        if matches:
            sent = rule.startswith("!")
    return sent


def free_ports(num: int) -> list[int]:
    """Ports of loopback that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [listening.getsockname()[1] for listening in sockets]


def variables(value: str) -> dict[str, str]:
    """What an ENV step sets."""
    return dict(part.partition("=")[::2] for part in shlex.split(value))


async def generate(target: str) -> str:
    """One answer from the server."""
    from clients.python import VorrangClient

    async with VorrangClient(target) as client:
        result = await client.generate(prompt="The capital of France is", max_tokens=8, temperature=0.0)
        return result.text


if __name__ == "__main__":
    main()
