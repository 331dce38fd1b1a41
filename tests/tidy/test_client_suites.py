"""The targets for Go and Java: what counts as missing, and what as failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import ROOT


def _run(language: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The suite where the only tools are the ones in a folder."""
    command = [sys.executable, "tools/client_suites.py", language]
    env = {**os.environ, "PATH": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def _tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("language", "tool"), [("go", "go"), ("java", "mvn")])
def test_a_missing_tool_is_one_line_and_no_failure(language: str, tool: str, tmp_path: Path) -> None:
    done = _run(language, tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith(f"{tool} is not installed")


@pytest.mark.parametrize(
    "said",
    [
        'go: m@v1: Get "https://proxy": dial tcp: lookup proxy: no such host',
        "Could not transfer artifact a:b:pom:1 from/to central: transfer failed",
        "Could not resolve dependencies: Cannot access central in offline mode",
    ],
)
def test_a_missing_network_is_one_line_and_no_failure(said: str, tmp_path: Path) -> None:
    for language, tool in (("go", "go"), ("java", "mvn")):
        _tool(tmp_path, tool, f"echo '{said}'; exit 1")
        done = _run(language, tmp_path)
        assert done.returncode == 0
        assert done.stdout.count("\n") == 1
        assert "no network" in done.stdout
        assert said in done.stdout


@pytest.mark.parametrize(
    "said",
    [
        "verifying m@v1: checksum mismatch\n\nSECURITY ERROR",
        "Could not find artifact io.grpc:grpc-bom:pom:99 in central",
    ],
)
def test_a_wrong_dependency_is_a_failure(said: str, tmp_path: Path) -> None:
    for language, tool in (("go", "go"), ("java", "mvn")):
        _tool(tmp_path, tool, f"echo '{said}'; exit 3")
        done = _run(language, tmp_path)
        assert done.returncode == 3
        assert said in done.stdout
        assert "dependencies are wrong" in done.stdout


def test_a_failing_test_is_a_failure_even_when_it_speaks_of_the_network(tmp_path: Path) -> None:
    _tool(
        tmp_path,
        "go",
        'case "$1" in env) echo 0;; test) echo "dial tcp: connection refused"; exit 1;; esac',
    )
    _tool(tmp_path, "mvn", 'case "$*" in *maven.test.skip*) ;; *) echo "connection refused"; exit 1;; esac')
    for language in ("go", "java"):
        assert _run(language, tmp_path).returncode == 1


def test_what_passes_shows_the_runners_own_lines(tmp_path: Path) -> None:
    _tool(tmp_path, "go", 'case "$1" in env) echo 0;; test) echo "ok  the/module  1.2s";; esac')
    _tool(tmp_path, "mvn", 'case "$*" in *-q*) ;; *) echo "Tests run: 5, Failures: 0";; esac')
    assert "ok  the/module" in _run("go", tmp_path).stdout
    assert "Tests run: 5" in _run("java", tmp_path).stdout
