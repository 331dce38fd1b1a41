"""What a policy must write, and what its order may rely on."""

import pytest

from engine.request import Request, RequestId, RequestSpec, SamplingParams
from engine.scheduler import policies
from engine.scheduler.order import Policy, PriorityPolicy, WaitingQueue
from tests.support import admissible
from tests.support.drive import Driver


class ShortestFirst(Policy):
    """Level, then the length of the prompt, then arrival."""

    name = "shortest"

    def order(self, request):
        return (request.num_prompt_tokens,)


@pytest.fixture
def shortest(monkeypatch):
    monkeypatch.setitem(policies.POLICIES, "shortest", ShortestFirst)
    monkeypatch.setitem(admissible.ORDERS, "shortest", lambda spec: (len(spec.prompt_token_ids),))


def request(name, arrival_seq, num_tokens=4, level=0):
    spec = RequestSpec(RequestId(name), tuple(range(num_tokens)), SamplingParams(max_tokens=2), level=level)
    return Request(spec, arrival_seq, 0.0)


def test_one_method_makes_a_policy(shortest):
    drive = Driver(num_blocks=64, policy="shortest", max_running_requests=1)
    for name, size, level in (("r30", 30, 0), ("r20", 20, 0), ("r10", 10, 0), ("urgent", 40, -5)):
        drive.submit(name, size, level=level)
    assert drive.waiting() == ["urgent", "r10", "r20", "r30"]
    drive.submit("same", 10)
    assert drive.waiting() == ["urgent", "r10", "same", "r20", "r30"]
    began = []
    while drive.scheduler.has_requests:
        began += [name for name in drive.running() if name not in began] if drive.step() else []
    assert began == ["urgent", "r10", "same", "r20", "r30"]
    drive.finish()


def test_a_queue_keeps_two_requests_with_one_key_apart_or_says_so():
    queue = WaitingQueue(lambda request: (request.level, request.num_prompt_tokens))
    queue.push(request("a", 0))
    with pytest.raises(AssertionError, match="same key"):
        queue.push(request("b", 1))
    assert [r.request_id for r in queue] == ["a"]
    queue.push(request("c", 2, num_tokens=5))
    queue.check_integrity()


def test_an_order_that_nothing_would_look_at_is_refused():
    with pytest.raises(TypeError, match="does not look at its order"):

        class Unseen(PriorityPolicy):
            def order(self, request):
                return (request.num_prompt_tokens,)

    with pytest.raises(TypeError, match="come together"):

        class Half(PriorityPolicy):
            def rank(self, request):
                return (request.num_prompt_tokens,)

    class Without(Policy):
        name = "without"

    with pytest.raises(TypeError, match="order"):
        Without()
