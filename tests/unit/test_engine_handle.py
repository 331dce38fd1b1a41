"""What waits in a handle: merged, but for what would make too large a message."""

import pytest

from engine.events import Delta, PositionLogProbs, PromptLogProbs
from engine.handle import MAX_POSITIONS, RequestHandle
from engine.request import RequestId, RequestSpec


@pytest.fixture
def handle():
    return RequestHandle(RequestSpec(RequestId("a"), (1,)), 0, lambda command: None)


def delta(index, *, logprobs=True):
    found = (PositionLogProbs(index, -1.0),) if logprobs else ()
    return Delta(RequestId("a"), index, (index,), "x", found)


@pytest.mark.asyncio
async def test_log_probabilities_are_merged_up_to_so_many_in_one_event(handle):
    for index in range(2 * MAX_POSITIONS + 1):
        handle.put(delta(index))
    events = handle.take()
    assert [len(event.token_ids) for event in events] == [MAX_POSITIONS, MAX_POSITIONS, 1]
    assert [event.first_index for event in events] == [0, MAX_POSITIONS, 2 * MAX_POSITIONS]
    assert all(len(event.logprobs) == len(event.token_ids) == len(event.text) for event in events)


@pytest.mark.asyncio
async def test_without_them_all_that_waits_is_one_event(handle):
    for index in range(2 * MAX_POSITIONS):
        handle.put(delta(index, logprobs=False))
    assert [len(event.token_ids) for event in handle.take()] == [2 * MAX_POSITIONS]


@pytest.mark.asyncio
async def test_those_of_a_prompt_are_cut_and_joined_alike(handle):
    positions = tuple(PositionLogProbs(index, -1.0) for index in range(1, 2 * MAX_POSITIONS + 12))
    handle.put(PromptLogProbs(RequestId("a"), 1, positions[:5]))
    handle.put(PromptLogProbs(RequestId("a"), 6, positions[5:]))
    events = handle.take()
    assert [len(event.positions) for event in events] == [MAX_POSITIONS, MAX_POSITIONS, 11]
    for event in events:
        assert event.positions[0].token_id == event.first_index
