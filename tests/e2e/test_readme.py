"""What the README tells a new user to run."""

import re
import subprocess
import sys

from tests.support.process import ROOT, environment, server_process


def test_the_first_client_works_as_it_stands() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "127.0.0.1:50051" in code
    with server_process() as server:
        done = subprocess.run(
            [sys.executable, "-c", code.replace("127.0.0.1:50051", server.address)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            cwd=ROOT,
            env=environment(),
        )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^question: .+\nreport: .+ \(\d+ times preempted\)$", done.stdout, re.MULTILINE)


def test_the_first_program_in_go_is_the_example_that_is_compiled() -> None:
    (program,) = re.findall(r"```go\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = (ROOT / "clients/go/example_test.go").read_text()
    comment = "// The same lines stand in the README, where they are a program.\n"
    assert comment in example
    as_program = example.replace("package vorrang_test", "package main").replace(comment, "")
    assert program == as_program.replace("func Example()", "func main()")
