"""Work on texts in a process: bounds, deaths, and what a job costs before it is refused."""

import asyncio
import os
from array import array
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.errors import ContextExceeded, InvalidRequest
from engine.runner.scripted import ScriptedTokenizer
from engine.text import ChatMessage, PromptLimit
from engine.text_work.jobs import Decode, EncodeChat, EncodePieces, EncodeText
from engine.text_work.places import TooDear
from engine.text_work.process import TextProcess, TextProcessDied
from server.isolation import SHORT_BYTES, TextWork
from server.slots import Turn
from tests.support.process import HANGS_S, children
from tests.support.text_jobs import Broken, Die, Eat, Pid, Scripted, Spin

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(HANGS_S)]
LIMIT = PromptLimit(100, 8)


async def test_jobs_are_done_in_a_process_and_their_errors_come_back() -> None:
    place = TextProcess(Scripted())
    try:
        assert await place.run(EncodeText("abc", LIMIT)) == array("I", list(b"abc"))
        assert await place.run(EncodePieces(("a", " b"))) == [(97,), (32, 98)]
        assert await place.run(Decode(array("I", list(b"hi")), True)) == "hi"
        chat = EncodeChat((ChatMessage("user", "x"),), False, "", LIMIT)
        assert await place.run(chat) == array("I", list(b"user: x\n"))
        with pytest.raises(
            ContextExceeded, match=r"prompt must be shorter than the context of 100 .* got 101"
        ):
            await place.run(EncodeText("a" * 101, LIMIT))
        pid = await place.run(Pid())
        assert pid == place.pid != os.getpid()
    finally:
        await place.close()
    assert not psutil.pid_exists(pid)


async def test_a_text_that_takes_too_long_is_ended_alone_and_typed() -> None:
    place = TextProcess(Scripted(), cpu_s_max=1)
    try:
        with pytest.raises(TooDear, match="prompt must be turned into tokens in 1 s of processor time"):
            await place.run(Spin())
        assert await place.run(EncodeText("a", LIMIT)) == array("I", list(b"a"))
    finally:
        await place.close()


async def test_a_process_that_was_killed_is_replaced_and_its_job_done_again(tmp_path: Path) -> None:
    place = TextProcess(Scripted())
    try:
        assert await place.run(Die(tmp_path / "died")) == "alive"
        with pytest.raises(TextProcessDied, match="SIGKILL"):
            await place.run(Die(tmp_path / "died", always=True))
        assert await place.run(EncodeText("a", LIMIT)) == array("I", list(b"a"))
    finally:
        await place.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux bounds it")
async def test_the_memory_of_a_job_is_bounded() -> None:
    place = TextProcess(Scripted())
    try:
        with pytest.raises(TextProcessDied):
            await place.run(Eat())
    finally:
        await place.close()


async def test_what_can_not_be_loaded_says_why_and_leaves_nothing() -> None:
    before = len(children())
    with pytest.raises(ValueError, match="it is broken"):
        await TextWork.in_processes(Broken())
    assert len(children()) == before


async def test_a_waiting_short_text_passes_a_long_one_that_takes_for_ever() -> None:
    work = TextWork([TextProcess(Scripted())], TextProcess(Scripted(), cpu_s_max=3600))
    try:
        long = asyncio.create_task(work.run(Spin(SHORT_BYTES + 1), Turn(lambda: -100, "")))
        await asyncio.sleep(0)
        assert await work.run(EncodeText("a", LIMIT), Turn(lambda: 100, "")) == array("I", list(b"a"))
        assert not long.done()
        assert work.statistics().long.num_running == 1
        long.cancel()
    finally:
        await work.close()
    assert work.statistics().long.num_running == 0


class Counting(ScriptedTokenizer):
    """A tokenizer that counts what it is given."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def encode(self, text: str) -> list[int]:
        self.num_bytes += len(text)
        return super().encode(text)


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_text_far_too_long_is_refused_after_a_part_of_it(is_chat: bool) -> None:
    tokenizer, text = Counting(), "1" * 3_900_000
    limit = PromptLimit(2000, 4000)
    job: Any = (
        EncodeChat((ChatMessage("user", text),), True, "", limit) if is_chat else EncodeText(text, limit)
    )
    with pytest.raises(ContextExceeded) as refused:
        job.run(tokenizer)
    assert tokenizer.num_bytes <= 64 * 1024
    assert refused.value.num_tokens == 64 * 1024  # type: ignore[attr-defined]


async def test_more_bytes_than_any_context_holds_are_refused_unseen() -> None:
    tokenizer = Counting()
    with pytest.raises(ContextExceeded, match=r"prompt must be .* 800 bytes at most, got 801"):
        EncodeText("a" * 801, LIMIT).run(tokenizer)
    assert tokenizer.num_bytes == 0


@pytest.mark.parametrize("tools", ["[" * 5000, '[{"a": "\\ud800"}]', '[{"a": 1' + "0" * 5000 + "}]", "{"])
async def test_tools_of_any_kind_are_the_callers_fault(tools: str, tmp_path: Path) -> None:
    from engine.text_work.worker import FolderTokenizer
    from tests.support.models import write_tiny_tokenizer

    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools[0].a }}{{ tools | tojson }}")
    chat = EncodeChat((ChatMessage("user", "x"),), True, tools, PromptLimit(100_000, 8))
    with pytest.raises(InvalidRequest):
        chat.run(FolderTokenizer(tmp_path).load())
