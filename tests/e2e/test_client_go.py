"""The Go client, where Go is installed: generated code, style, its own tests, and the README's program."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import ROOT, server_process

GO = ROOT / "clients/go"
pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed"),
    pytest.mark.timeout(900),  # the first run compiles gRPC
]


def go(*arguments: str) -> str:
    """Output of the go command; it must succeed."""
    done = subprocess.run(
        ["go", *arguments],
        cwd=GO,
        env={**os.environ, "VORRANG_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_stubs_are_up_to_date() -> None:
    command = [sys.executable, "tools/protos.py", "check-go"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_is_formatted_and_vetted() -> None:
    unformatted = subprocess.run(["gofmt", "-l", "."], cwd=GO, capture_output=True, text=True, check=True)
    assert unformatted.stdout == ""
    go("vet", "./...")


def test_its_own_tests_pass_and_really_had_a_server() -> None:
    race = ["-race"] if go("env", "CGO_ENABLED").strip() == "1" else []
    output = go("test", *race, "-count=1", "-v", "./...")
    assert "there is no server to test with" not in output
    assert "--- PASS: TestARequestStreamsItsEventsToTheEnd" in output


def test_the_readmes_program_works_as_it_stands(tmp_path: Path) -> None:
    (program,) = re.findall(r"```go\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "127.0.0.1:50051" in program
    with server_process() as server:
        (tmp_path / "main.go").write_text(program.replace("127.0.0.1:50051", server.address))
        output = go("run", str(tmp_path / "main.go"))
    assert re.search(r"^question: .+\nreport: .+ \(\d+ times preempted\)$", output, re.MULTILINE)
