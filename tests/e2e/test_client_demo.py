"""``vorrangctl demo`` with the real server and its scripted model."""

import asyncio
import os
import signal
import sys

import psutil
import pytest

from server.trace import trace
from tests.support.trace_events import checked

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(90)]


async def start(*arguments: str, step_s: float) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "clients.python.cli", "demo", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "VORRANG_MODEL__PATH": "scripted",
            "VORRANG_ENGINE__SCRIPTED_STEP_S": str(step_s),
        },
    )


@pytest.mark.slow
async def test_the_demo_shows_preemption_and_confirms_its_promises(tmp_path):
    arguments = ("--batch", "3", "--seats", "1", "--max-tokens", "40", "--interactive", "1", "--gap", "10")
    process = await start(*arguments, "--decisions", str(tmp_path / "logs"), step_s=0.01)
    out, err = (stream.decode() for stream in await process.communicate())
    assert process.returncode == 0, out + err
    assert out.count(" ok ") == 4
    for part in ("PREEMPTED", "resumed", "8 of 8 streams", "token for token", "interactive-1"):
        assert part in out
    assert "Traceback" not in err
    assert f"decisions kept in {tmp_path}/logs/priority.log" in out
    for policy, num_cuts in (("priority", 1), ("fcfs", 0)):
        output = tmp_path / f"{policy}.json"
        trace(tmp_path / f"logs/{policy}.log", output, None)
        events = checked(output.read_text())
        cuts = [event for event in events if event["ph"] == "s" and event["name"] == "gives way to"]
        assert len(cuts) == num_cuts, policy
        assert len({event["args"]["request"] for event in events if event["ph"] == "X"}) == 4


@pytest.mark.slow
async def test_a_terminated_demo_leaves_no_server_behind():
    process = await start("--max-tokens", "1000", step_s=0.05)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while b"running" not in await process.stdout.readline():
            pass
    children = psutil.Process(process.pid).children()
    assert len(children) == 1
    process.send_signal(signal.SIGTERM)
    _, err = await process.communicate()
    assert (process.returncode, err.decode()) == (143, "vorrangctl: terminated\n")
    assert not children[0].is_running()
