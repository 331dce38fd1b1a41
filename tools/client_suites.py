"""Run the Go or the Java client's tests against this server, where that can be done.

Usage: ``python tools/client_suites.py go | java``

Dependencies are fetched first, by a command that compiles none of our code. Where the language's tool is
missing, or its dependencies can't be fetched for want of a network, one line says so and that is a
success; whatever else goes wrong, there or in the tests after it, is a failure.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: What the tools say when they can't reach a registry. A version that a registry does not have, or a checksum
#: that is wrong, is a failure and not in here.
_NO_NETWORK = re.compile(
    r"dial tcp|no such host|name resolution|connection refused|network is unreachable|no route to host"
    r"|i/o timeout|timed? ?out|TLS handshake|proxyconnect|module lookup disabled|unknown host"
    r"|could not transfer|failed to transfer|in offline mode",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Suite:
    """The tests of one client.

    Attributes:
        language: as people call it.
        tool: program that must be there.
        folder: where the commands run, relative to the repository.
        fetch: gets all dependencies and does nothing else that could fail.
        tests: run in turn until one fails.
    """

    language: str
    tool: str
    folder: str
    fetch: Sequence[str]
    tests: Callable[[], Sequence[Sequence[str]]]


def _go_tests() -> Sequence[Sequence[str]]:
    cgo = subprocess.run(["go", "env", "CGO_ENABLED"], capture_output=True, text=True, check=True)
    race = ["-race"] if cgo.stdout.strip() == "1" else []
    return [["go", "vet", "./..."], ["go", "test", "-count=1", *race, "./..."]]


def _java_tests() -> Sequence[Sequence[str]]:
    return [["mvn", "-B", "-ntp", "-Dstyle.color=never", "verify"]]


SUITES = {
    "go": Suite("Go", "go", "clients/go", ["go", "mod", "download"], _go_tests),
    "java": Suite(
        "Java",
        "mvn",
        "clients/java",
        ["mvn", "-B", "-q", "verify", "-Dmaven.main.skip", "-Dmaven.test.skip", "-Dstyle.color=never"],
        _java_tests,
    ),
}


def run(suite: Suite) -> int:
    """Fetch, then test; the exit status."""
    if shutil.which(suite.tool) is None:
        print(f"{suite.tool} is not installed: the {suite.language} client is not tested")
        return 0
    folder = ROOT / suite.folder
    fetched = subprocess.run(suite.fetch, cwd=folder, capture_output=True, text=True, check=False)
    if fetched.returncode:
        said = fetched.stdout + fetched.stderr
        cause = no_network(said)
        if cause is None:
            print(said, end="")
            print(f"the {suite.language} client's dependencies are wrong: {' '.join(suite.fetch)} failed")
            return fetched.returncode
        print(f"no network for {suite.language}'s dependencies, the client is not tested: {cause}")
        return 0
    env = {"VORRANG_PYTHON": sys.executable, **os.environ}
    for command in suite.tests():
        status = subprocess.run(command, cwd=folder, env=env, check=False).returncode
        if status:
            return status
    return 0


def no_network(said: str) -> str | None:
    """The line by which a tool says that it can't reach a registry; None when it says something else."""
    return next((line.strip() for line in said.splitlines() if _NO_NETWORK.search(line)), None)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in SUITES:
        sys.exit(__doc__)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # ours and the tools' lines in order
    sys.exit(run(SUITES[sys.argv[1]]))
