"""Messages that are made of too many things are refused before they are parsed."""

import contextlib
import random

import pytest

from engine.errors import InvalidRequest, MalformedFrame
from server.wire_shape import MAX_ENTRIES, MAX_FIELDS, check_shape
from tests.support.wire_bombs import BOMBS, frame
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types


def check(raw: bytes, message_class: object = gen.SessionRequest, max_token_ids: int = 8192) -> None:
    check_shape(raw, message_class, max_token_ids=max_token_ids)


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_take_long_to_parse_is_refused_by_name(name: str) -> None:
    raw, field = BOMBS[name]
    with pytest.raises((InvalidRequest, MalformedFrame)) as refused:
        check(frame(raw))
    assert refused.value.field == field


def test_what_is_large_and_simple_passes() -> None:
    spec = types.GenerationSpec()
    spec.prompt.text = "1" * 4_000_000
    check(gen.SessionRequest(start=gen.StartCommand(request_id="a", spec=spec)).SerializeToString())
    spec.prompt.tokens.ids.extend(range(1_000_000))
    spec.sampling.logit_bias.extend(types.LogitBias(token_id=i, bias=1) for i in range(1024))
    spec.sampling.banned_sequences.extend(types.TokenIds(ids=[1] * 32) for _ in range(256))
    raw = gen.GenerateRequest(spec=spec).SerializeToString()
    check(raw, gen.GenerateRequest, 1_000_000)
    with pytest.raises(InvalidRequest, match=r"prompt\.tokens\.ids must hold at most 999999 entries"):
        check(raw, gen.GenerateRequest, 999_999)
    for count in (20_000, 20_001):
        raw = gen.DetokenizeRequest(token_ids=[70_000] * count).SerializeToString()
        if count == 20_000:
            check(raw, gen.DetokenizeRequest, 20_000)
        else:
            with pytest.raises(InvalidRequest, match="token_ids must hold at most 20000 entries"):
                check(raw, gen.DetokenizeRequest, 20_000)


def test_as_many_messages_as_may_be_pass() -> None:
    spec = types.GenerationSpec()
    spec.prompt.chat.messages.extend(
        types.ChatMessage(role="user", content=str(i)) for i in range(MAX_ENTRIES)
    )
    check(gen.GenerateRequest(spec=spec).SerializeToString(), gen.GenerateRequest)
    assert 3 * MAX_ENTRIES < MAX_FIELDS
    spec.prompt.chat.messages.add()
    with pytest.raises(InvalidRequest, match=r"prompt\.chat\.messages must hold at most 8192 entries"):
        check(gen.GenerateRequest(spec=spec).SerializeToString(), gen.GenerateRequest)


def test_bytes_that_are_no_message_are_left_to_the_parser() -> None:
    source = random.Random(3)
    for size in (20_000, 100_000):
        for _ in range(30):
            raw = source.randbytes(size)
            with contextlib.suppress(InvalidRequest, MalformedFrame):
                check(raw)
            check(bytes([0x12, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F]) + b"a" * 20_000)
