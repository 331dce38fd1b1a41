"""What a session makes of a real server that falls silent or dies."""

import asyncio
import signal
from pathlib import Path

import pytest

from clients.python import Accepted, ConnectionLost, VorrangClient
from clients.python.demo_server import serve_command, serving

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_nobody_waits_for_a_server_that_is_gone(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VORRANG_ENGINE__SCRIPTED_STEP_S", "0.02")
    command = serve_command("--model", "scripted")
    async with (
        serving(command, tmp_path / "log", ready_timeout_s=40) as server,
        # Pings every second would get a living server's GOAWAY in time, but this one is soon silent.
        VorrangClient(server.target, keepalive_s=1.0, keepalive_timeout_s=0.5) as client,
        client.session(reconnect_s=0.5) as session,
    ):
        streams = [await session.start("x", max_tokens=1000) for _ in range(2)]
        assert isinstance(await anext(streams[0]), Accepted)
        server.process.send_signal(how)
        try:
            async with asyncio.timeout(20):
                for stream in streams:
                    with pytest.raises(ConnectionLost):
                        await stream.result()
        finally:
            if how is signal.SIGSTOP:
                server.process.kill()
