"""The commands of docs/EXPLAIN.md, run as they stand there, against a server that is used meanwhile."""

import asyncio
import re
import shlex
import threading

import pytest
from typer.testing import CliRunner

from clients.python import VorrangClient
from clients.python.cli import main as vorrangctl
from server.cli import main as vorrang
from tests.support.process import ROOT, server_process
from tests.support.trace_events import checked

TEXT = (ROOT / "docs/EXPLAIN.md").read_text()
COMMANDS = [
    line[2:] for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()
]
ADDRESS = "127.0.0.1:50051"


def use(address):
    """Two requests, one of which overtakes the other."""

    async def go():
        async with VorrangClient(address) as client, client.session() as session:
            settings = {"temperature": 0.0, "token_ids": [1] * 20}
            essay = await session.start(request_id="essay", priority="batch", max_tokens=40, **settings)
            await asyncio.sleep(0.2)
            question = await session.start(priority="interactive", max_tokens=8, **settings)
            await asyncio.gather(essay.result(), question.result())

    asyncio.run(go())


def run(command, address):
    program, *arguments = shlex.split(
        command.replace(ADDRESS, address).replace("--seconds 10", "--seconds 1.5")
    )
    if program == "vorrangctl" and "--target" not in arguments:
        arguments += ["--target", address]
    done = CliRunner().invoke({"vorrang": vorrang, "vorrangctl": vorrangctl}[program], arguments)
    assert done.exit_code == 0, (command, done.output)
    return done.stdout


@pytest.mark.slow
def test_the_commands_do_what_the_page_says(tmp_path, monkeypatch) -> None:
    serve = COMMANDS[0]
    assert serve.startswith("vorrang serve ")
    monkeypatch.chdir(tmp_path)
    arguments = ["--scripted-step-ms", "10", "--max-running-requests", "1", *shlex.split(serve)[2:]]
    arguments = [str(tmp_path / a) if a == "decisions.log" else a for a in arguments]
    told = {}
    with server_process(*arguments) as server:
        users = threading.Thread(target=use, args=(server.address,))
        for command in COMMANDS[1:]:
            if command.startswith("vorrangctl trace"):
                users.start()
                told[command] = run(command, server.address)
                users.join()
                checked((tmp_path / "trace.json").read_text())
            elif command.startswith("vorrangctl explain"):
                told[command] = run(command, server.address)
        server.terminate()
        assert server.wait() == 0
    told |= {c: run(c, "") for c in COMMANDS[1:] if c.startswith("vorrang ")}
    assert told.keys() == set(COMMANDS[1:])
    checked((tmp_path / "trace.json").read_text())
    assert (tmp_path / "timeline.png").exists()
    story = told["vorrangctl explain essay"]
    assert "preempted once" in " ".join(story.split())
    example = re.search(r"```text\n(.*?)```", TEXT, re.DOTALL)[1]
    for line in ("TTFT ", "TPOT ", "It was preempted once", "in all", "Its last event was written"):
        assert line in example
        assert line in story
