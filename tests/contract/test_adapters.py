"""What every server promises of adapters: each request gets the one it names, and nothing of another's."""

from typing import Any

import grpc
import pytest

from tests.support.wire import open_session, reason_in, refused, spec, stub
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio
#: Longer than a block of 16 tokens, and in no other test.
PROMPT = "whose words are these, and who is to be blamed for them? " * 2


async def known(channel: Any) -> list[str]:
    adapters = list((await stub(channel).GetModel(gen.GetModelRequest())).adapters)
    if not adapters:
        pytest.skip("this server has no adapters")
    return adapters


def adapted(adapter: str, **sampling: Any) -> types.GenerationSpec:
    message = spec(PROMPT, **({"max_tokens": 8, "ignore_eos": True} | sampling))
    message.adapter = adapter
    return message


async def test_adapters_share_a_step_and_no_prefix(channel: Any) -> None:
    names = ["", *await known(channel)]
    async with open_session(channel) as session:
        for name in names:
            await session.start(f"one {name}", adapted(name))
        ended: set[str] = set()
        while len(ended) < len(names):
            frame = await session.until(lambda frame: frame.HasField("finished"))
            ended.add(frame.request_id)
        found = {name: session.tokens(f"one {name}") for name in names}
        for name in names:  # alone, and from the cache
            await session.start(f"again {name}", adapted(name))
            end = await session.end_of(f"again {name}")
            assert end.finished.usage.cached_tokens > 0
            assert session.tokens(f"again {name}") == found[name]
    assert len({tuple(tokens) for tokens in found.values()}) == len(names)


async def test_nobody_finds_a_prefix_of_another_adapter(channel: Any) -> None:
    name, *_ = await known(channel)
    prompt = [9] * 40
    async with open_session(channel) as session:
        cached = []
        for index, adapter in enumerate(["", name, "", name]):
            message = spec(prompt, max_tokens=1)
            message.adapter = adapter
            await session.start(str(index), message)
            cached.append((await session.end_of(str(index))).finished.usage.cached_tokens)
    assert (cached[1] == 0, cached[2] > 0, cached[3] > 0) == (True, True, True)


async def test_an_unknown_adapter_is_refused_with_the_names_of_those_there_are(channel: Any) -> None:
    names = sorted((await stub(channel).GetModel(gen.GetModelRequest())).adapters)
    status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=adapted("nobody's"))))
    assert (status.code, reason_in(status)) == (grpc.StatusCode.NOT_FOUND.value[0], "UNKNOWN_MODEL")
    there = f"only {', '.join(map(repr, names))}" if names else "none at all"
    assert status.message == f'adapter "nobody\'s" is not served, {there}'
