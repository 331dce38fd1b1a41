"""One transcript in three languages: see ``clients/transcript/README.md``."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engine.priority import class_of, level_named
from engine.runner.scripted import expected_output
from tests.support.process import ROOT, server_process
from tests.support.transcript import golden, perform, play, write_config

pytestmark = pytest.mark.timeout(120)


def _level(priority: str) -> int:
    return level_named(priority) if priority.isalpha() else int(priority)


def test_the_golden_texts_are_what_the_scripted_model_says() -> None:
    requests = json.loads(golden())["requests"]
    starts = {act["id"]: act for act in play()["acts"] if act["do"] == "start"}
    assert requests.keys() == starts.keys()
    for name, start in starts.items():
        expected = bytes(expected_output(list(name.encode()), start["max_tokens"])).decode()
        text, events = requests[name]["text"], requests[name]["events"]
        assert expected.startswith(text)
        assert text == expected or events[-1] == f"finished CANCELLED {start['credit_tokens']}"
        assert events[0] == f"accepted {_level(start['priority'])}"
        assert events[-1].split(" ")[2] == str(len(text))


def test_the_transcript_holds_what_it_is_there_for() -> None:
    acts = play()["acts"]
    assert Counter(act["do"] for act in acts) >= Counter(start=20, cancel=1, reprioritize=1, cut=1)
    classes = {class_of(_level(act["priority"])).name for act in acts if act["do"] == "start"}
    assert classes == {"interactive", "standard", "batch"}
    account = json.loads(golden())
    assert account["resumed"]
    kinds = Counter(line.split(" ")[0] for seen in account["requests"].values() for line in seen["events"])
    assert (kinds["preempted"], kinds["resumed"], kinds["priority_changed"]) == (1, 1, 1)
    assert kinds["finished"] == 20


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_transcript_in_python_is_the_one_of_the_other_languages(tmp_path: Path) -> None:
    with server_process("--config", str(write_config(tmp_path / "vorrang.toml"))) as server:
        assert await perform(server.address) == golden()


@pytest.mark.deep
@pytest.mark.asyncio
@pytest.mark.timeout(900)  # the first run compiles gRPC
@pytest.mark.skipif(not (shutil.which("go") and shutil.which("mvn")), reason="needs Go and Maven")
async def test_three_languages_write_down_the_same_of_one_server(tmp_path: Path) -> None:
    with server_process(
        "--config", str(write_config(tmp_path / "vorrang.toml")), log=tmp_path / "log"
    ) as server:
        in_python = await perform(server.address)
        in_go = _elsewhere(
            server.address,
            tmp_path / "go.json",
            "clients/go",
            ["go", "test", "-count=1", "-run=^TestTheTranscript", "."],
        )
        in_java = _elsewhere(
            server.address,
            tmp_path / "java.json",
            "clients/java",
            ["mvn", "-B", "-ntp", "-Dtest=TranscriptTest", "test"],
        )
    assert in_go == in_python
    assert in_java == in_python


def _elsewhere(address: str, out: Path, folder: str, command: list[str]) -> str:
    """What another language writes down of the transcript on this server."""
    variables = {
        "VORRANG_PYTHON": sys.executable,
        "VORRANG_TRANSCRIPT_SERVER": address,
        "VORRANG_TRANSCRIPT_OUT": str(out),
    }
    done = subprocess.run(
        command,
        cwd=ROOT / folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return out.read_text()
