"""What every server promises of structured output, with the one kind of grammar that all models have."""

from typing import Any

import grpc
import pytest

from tests.support.wire import open_session, reason_in, spec, stub
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio

ANSWERS = ("yes", "no", "maybe so")


def answers(*options: str, **sampling: Any) -> types.GenerationSpec:
    message = spec("is it?", **({"max_tokens": 20, "temperature": 1.0} | sampling))
    message.grammar.choice.options.extend(options)
    return message


async def test_a_choice_is_obeyed_and_ends_the_output(channel: Any) -> None:
    async with open_session(channel) as session:
        for seed in range(3):
            await session.start(str(seed), answers(*ANSWERS, seed=seed))
            end = (await session.end_of(str(seed))).finished
            assert session.text(str(seed)) in ANSWERS
            assert end.reason == types.FINISH_REASON_STOP
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=answers(*ANSWERS)))
    assert answer.text in ANSWERS


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (types.Grammar(), "grammar"),
        (types.Grammar(choice=types.Choice()), "grammar.choice.options"),
        (types.Grammar(choice=types.Choice(options=["a", ""])), "grammar.choice.options[1]"),
        (types.Grammar(regex=""), "grammar.regex"),
        (types.Grammar(json_schema="x" * 70_000), "grammar.json_schema"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_grammar_is_refused_by_field_and_alone(
    channel: Any, grammar: types.Grammar, field: str
) -> None:
    """vLLM 16: here it is refused before it is queued."""
    message = spec("x")
    message.grammar.CopyFrom(grammar)
    message.grammar.SetInParent()
    async with open_session(channel) as session:
        await session.start("bad", message)
        failed = (await session.end_of("bad")).failed
        await session.start("other", spec("hello", max_tokens=3))
        assert (await session.end_of("other")).HasField("finished")
    assert failed.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert reason_in(failed.status) == "INVALID_REQUEST"
    assert failed.status.message.startswith(f"{field} must")
