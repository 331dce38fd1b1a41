"""The Java client: what others' changes can make wrong is held here, all the rest by its own tests."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.process import ROOT
from vorrang.v1 import errors_pb2

JAVA = ROOT / "clients" / "java"


def test_the_readme_shows_the_java_example_that_is_compiled() -> None:
    (snippet,) = re.findall(r"### Java\n.*?```java\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    source = (JAVA / "src/main/java/io/vorrang/examples/FirstClient.java").read_text()
    _, _, body = source.partition(";\n\n")
    assert snippet == body


def test_the_java_client_knows_every_reason_of_an_error() -> None:
    source = (JAVA / "src/main/java/io/vorrang/client/Reason.java").read_text()
    known = set(re.findall(r"^  ([A-Z_]+),?$", source, re.MULTILINE)) - {"NONE", "UNKNOWN"}
    names = {value.name.removeprefix("ERROR_REASON_") for value in errors_pb2.ErrorReason.DESCRIPTOR.values}
    assert known == names - {"UNSPECIFIED"}


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("mvn") is None, reason="there is no mvn: the Java client can't be built")
def test_the_java_client_passes_its_own_tests() -> None:
    done = subprocess.run(
        ["mvn", "-B", "-q", "verify"],
        cwd=JAVA,
        env={**os.environ, "VORRANG_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    reports = [path.read_text() for path in (JAVA / "target/surefire-reports").glob("*.txt")]
    counts = [re.search(r"Tests run: (\d+),.* Skipped: (\d+)", report) for report in reports]
    run = sum(int(count[1]) - int(count[2]) for count in counts if count)
    assert run > 50, f"only {run} of the tests ran"
