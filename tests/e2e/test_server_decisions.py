"""The decision log of a real server, replayed by another process."""

import json
from pathlib import Path

import grpc.aio
import pytest

from tests.support.process import run_cli, server_process
from tests.support.wire import open_session, spec

SETTINGS = ("--scripted-step-ms", "1", "--max-running-requests", "2", "--kv-blocks", "24", "--grace-s", "20")


async def record(path: Path, *more: str) -> None:
    """A server with too few seats and blocks, used by everybody at once."""
    with server_process(*SETTINGS, "--record-decisions", str(path), *more) as server:
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            for number in range(4):
                await session.start(f"batch-{number}", spec([number] * 90, max_tokens=60, level=10))
            await session.event("delta", "batch-0")
            await session.start("urgent", spec([7] * 40, max_tokens=20, level=-10))
            await session.event("preempted")
            await session.start("refused", spec([1] * 50, max_tokens=100_000))
            await session.start("stops", spec("abc", max_tokens=40, level=-10, stop_strings=["a", "e", "Q"]))
            await session.reprioritize("batch-3", -1)
            await session.cancel("batch-2")
            for name in ("urgent", "stops", "batch-0"):
                await session.end_of(name)
            server.terminate()  # what runs may finish, what waits is failed
            await session.half_close()
            await session.to_the_end()
        assert server.wait() == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_servers_decisions_are_reproduced_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "decisions.log"
    await record(path)
    lines = path.read_text().splitlines()
    result = run_cli("sim", "replay", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    num_steps = sum('"call":"plan"' in line for line in lines)
    assert result.stdout == f"{num_steps:,} steps reproduced, {len(lines) - 2:,} calls in all\n"
    assert num_steps > 60
    for what in ('"Preempted"', '"Resumed"', '"SetLevel"', '"ContextExceeded"', '"reason":"cancelled"'):
        assert any(what in line for line in lines), what

    # A tampered decision is the first difference.
    number = next(i for i, line in enumerate(lines) if '"Preempted"' in line)
    body = json.loads(lines[number])
    body["events"][0]["num_lost_tokens"] += 1
    path.write_text("\n".join([*lines[:number], json.dumps(body), *lines[number + 1 :]]) + "\n")
    result = run_cli("sim", "replay", str(path))
    assert result.returncode == 1
    first, second = result.stdout.splitlines()
    assert first == f"{body['step'] - 1:,} steps reproduced, then the first difference:"
    lost = body["events"][0]["num_lost_tokens"]
    assert second == (
        f"step {body['step']} (line {number + 1}): plan events[0].num_lost_tokens: "
        f"recorded {lost}, now {lost - 1}"
    )

    # A damaged line is none.
    path.write_text("\n".join([*lines[:9], lines[9][:-5], *lines[10:]]) + "\n")
    result = run_cli("sim", "replay", str(path))
    assert result.returncode == 2
    assert result.stderr == f"vorrang: {path}: line 10: must be a JSON object\n"


@pytest.mark.deep
@pytest.mark.asyncio
async def test_a_full_log_is_reported_once_and_replays(tmp_path: Path) -> None:
    path = tmp_path / "decisions.log"
    config = tmp_path / "server.toml"
    config.write_text("[engine]\nrecord_decisions_max_bytes = 8192\n")
    await record(path, "--config", str(config))
    assert path.stat().st_size <= 8192
    result = run_cli("sim", "replay", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "the recording ended early: max_bytes"


def test_a_log_that_cannot_be_written_is_said_before_the_server_is_ready(tmp_path: Path) -> None:
    path = tmp_path / "no" / "decisions.log"
    result = run_cli(
        "serve", "--model", "scripted", "--listen", "127.0.0.1:0", "--record-decisions", str(path)
    )
    assert result.returncode == 2
    assert result.stderr == f"vorrang: the decision log {path} can't be written: No such file or directory\n"


@pytest.mark.deep
def test_a_simulated_run_replays(tmp_path: Path) -> None:
    path = tmp_path / "decisions.log"
    arguments = ("steady", "--duration", "10", "--limit", "8", "--set", "max_running_requests=2")
    for driver in ("direct", "engine"):
        result = run_cli("sim", "run", *arguments, "--driver", driver, "--record", str(path))
        assert result.returncode == 0, result.stderr
        result = run_cli("sim", "replay", str(path))
        assert result.returncode == 0, result.stdout + result.stderr
        assert "steps reproduced" in result.stdout
    result = run_cli("sim", "run", *arguments, "--compare", "all", "--record", str(path))
    assert result.returncode == 2
    assert "record must come with one configuration" in result.stderr


@pytest.mark.parametrize("what", ["missing", "foreign"])
def test_no_log_at_all_is_one_line_and_status_2(tmp_path: Path, what: str) -> None:
    path = tmp_path / "some.file"
    if what == "foreign":
        path.write_bytes(b"\x89PNG\r\n")
    result = run_cli("sim", "replay", str(path))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert str(path) in result.stderr
