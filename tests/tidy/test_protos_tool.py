"""The tool over the protos, in a scratch repository: pinned generators, compatibility with a release."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import ROOT

_TYPES = "protos/vorrang/v1/types.proto"


class Scratch:
    """A repository that has only what the tool looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in (
            "tools/protos.py",
            "tools/protos.toml",
            "buf.yaml",
            "clients/go/go.mod",
            "clients/java/pom.xml",
        ):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
        shutil.copytree(ROOT / "protos/vorrang", folder / "protos/vorrang")
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=self.folder, check=True)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "a commit")

    def replace(self, path: str, old: str, new: str) -> None:
        text = (self.folder / path).read_text()
        assert text.count(old) >= 1
        (self.folder / path).write_text(text.replace(old, new, 1))

    def run(self, what: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "tools/protos.py", what]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path)


def test_without_a_release_there_is_nothing_to_break(scratch: Scratch) -> None:
    scratch.git("tag", "nightly")
    done = scratch.run("breaking")
    assert (done.returncode, done.stdout) == (0, "there is no release to compare the protos with\n")


def test_what_breaks_the_last_release_is_found_and_what_adds_to_it_is_not(scratch: Scratch) -> None:
    scratch.replace(_TYPES, "optional uint32 top_k = 2;", "optional uint32 top_k = 202;")
    scratch.commit()
    scratch.git("tag", "v0.1.0")  # an older one, with which today's protos are not compatible
    scratch.replace(_TYPES, "optional uint32 top_k = 202;", "optional uint32 top_k = 2;")
    scratch.commit()
    scratch.git("tag", "v0.2.0")

    scratch.replace(_TYPES, "message TokenIds {", "message TokenIds {\n  // New.\n  bool added = 2000;")
    done = scratch.run("breaking")
    assert (done.returncode, done.stdout) == (0, "the protos are compatible with v0.2.0\n")

    scratch.replace(_TYPES, "optional uint32 top_k = 2;", "optional uint32 top_k = 2002;")
    done = scratch.run("breaking")
    assert done.returncode != 0
    assert "top_k" in done.stdout
    assert done.stdout.endswith("the protos break v0.2.0\n")


def test_the_pinned_generators_are_the_ones_in_use() -> None:
    done = subprocess.run(
        [sys.executable, "tools/protos.py", "pins"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        (
            "clients/java/pom.xml",
            "<protobuf.version>3",
            "<protobuf.version>4",
            "protoc in clients/java/pom.xml",
        ),
        ("clients/java/pom.xml", "<grpc.version>1", "<grpc.version>2", "protoc-gen-grpc-java in clients"),
        ("clients/java/pom.xml", "<artifactId>protoc-gen-grpc-java", "<artifactId>other", "is not there"),
        (
            "clients/go/go.mod",
            "google.golang.org/protobuf v1",
            "google.golang.org/protobuf v9",
            "go.mod is v9",
        ),
        ("tools/protos.toml", 'grpcio-tools = "1', 'grpcio-tools = "2', "grpcio-tools of this environment"),
    ],
)
def test_another_version_than_the_pinned_one_is_found(
    scratch: Scratch, path: str, old: str, new: str, said: str
) -> None:
    scratch.replace(path, old, new)
    done = scratch.run("pins")
    assert done.returncode == 1
    assert said in done.stdout
