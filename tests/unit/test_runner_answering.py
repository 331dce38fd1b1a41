"""The worker's loop: plans in, results out, and the next plan launched while one is computed."""

from collections import deque

import pytest

from engine.errors import InternalError
from engine.request import Request, RequestId, RequestSpec
from engine.runner.answering import _Launching, answer_plans
from engine.runner.base import LaunchingModel, ModelBroken, ModelInfo, PoolShape
from engine.runner.channel import PLAN, RESULT, STEP_FAILED
from engine.runner.delta import ANY_TOKEN_ID, PlanEncoder
from engine.runner.sources import ScriptedModel, ScriptedSource
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan, StepResult

NUM_LOOKS = 20


class Device:
    """A ``LaunchingModel`` that notes what happens.

    A step is computed if ``done`` holds its number, and otherwise once it was asked after often.
    Step n samples ``100 + n`` for everybody, unless ``outcomes`` has an error or a result for it.
    """

    info = ModelInfo("noted", "None", 256, 64, frozenset())
    pool = PoolShape(8, 4)

    def __init__(self, *done, refused=(), outcomes=()):
        self.notes, self.done, self.refused, self.outcomes = [], set(done), dict(refused), dict(outcomes)
        self.tokens = {}

    def run(self, plan):
        raise AssertionError("it is launched")

    def launch(self, plan):
        assert plan.grants
        self.notes.append(f"launch {plan.step}")
        if plan.step in self.refused:
            raise self.refused[plan.step]
        self.tokens[plan.step] = [None if g.has_unknown_token else g.token_ids[-1] for g in plan.grants]
        return OnDevice(self, plan)

    def collect(self, ticket):
        plan = ticket.plan
        self.notes.append(f"collect {plan.step}")
        outcome = self.outcomes.get(plan.step)
        if isinstance(outcome, Exception):
            raise outcome
        sampling = [g.request_id for g in plan.grants if g.output_index is not None]
        return outcome or StepResult(dict.fromkeys(sampling, 100 + plan.step))


class OnDevice:
    def __init__(self, device, plan):
        self.device, self.plan, self.num_looks = device, plan, 0

    @property
    def is_computed(self):
        self.num_looks += 1
        return self.plan.step in self.device.done or self.num_looks > NUM_LOOKS


class Channel:
    """Plans that are there from the start, or come after the loop has looked for them ``late`` times.

    A ``window`` keeps a plan back until so few are unanswered, as the engine does.
    """

    def __init__(self, device, plans, *, window=2):
        encoder = PlanEncoder()
        self._plans = deque((PLAN, encoder.encode(plan)) for plan in plans)
        self._device, self._window, self.late = device, window, 0
        self._num_unanswered, self._num_looks = 0, 0
        self.sent = []

    def receive(self):
        if not self._plans:
            return None
        self._num_unanswered += 1
        assert self._num_unanswered <= self._window, "it would wait for ever"
        self._num_looks = 0
        return self._plans.popleft()

    def has_message(self):
        self._num_looks += 1
        return bool(self._plans) and self._num_unanswered < self._window and self._num_looks > self.late

    def send(self, message):
        self._num_unanswered -= 1
        self.sent.append(message)
        self._device.notes.append(f"answer {message[1]}")


@pytest.fixture
def request_a():
    return Request(RequestSpec(RequestId("a"), (1, 2), SamplingParams()), 0, 0.0)


def prefill(request, step=1):
    return Plan(step, (Grant(request, 0, 2, [3], 0),))


def decode(request, step, *, name=None):
    """Of the token that the step before samples; the scheduler does not know it when it plans this."""
    return Plan(step, (Grant(request, step, 1, [3], step - 1),))


def served(device, plans, **how):
    channel = Channel(device, plans, **how)
    answer_plans(device, channel)
    return channel


def two_plans(request):
    return [prefill(request), decode(request, 2)]


def test_a_plan_that_is_there_is_launched_before_the_one_on_the_device_is_collected(request_a):
    device = Device()
    channel = served(device, two_plans(request_a))
    assert isinstance(device, LaunchingModel)
    assert device.notes == ["launch 1", "launch 2", "collect 1", "answer 1", "collect 2", "answer 2"]
    assert device.tokens == {1: [2], 2: [None]}, "the token is taken on the device"
    assert [message[:3] for message in channel.sent] == [(RESULT, 1, [101]), (RESULT, 2, [102])]


def test_one_that_comes_while_a_step_is_computed_is_launched_at_once_and_never_two(request_a):
    """As the engine does: the next plan follows some time after an answer."""
    other = Request(RequestSpec(RequestId("b"), (5, 6), SamplingParams()), 1, 0.0)
    device = Device()
    plans = [*two_plans(request_a), prefill(other, 3), Plan(4, (Grant(other, 0, 2, [4], 0),))]
    slept = []
    channel = Channel(device, plans)
    loop = _Launching(device, channel, lambda wait_s: slept.append(wait_s))

    def answered(message, send=channel.send):
        send(message)
        channel.late = 3

    channel.send = answered
    loop.answer_plans()
    assert device.notes == [
        "launch 1", "launch 2", "collect 1", "answer 1", "launch 3", "collect 2", "answer 2",
        "launch 4", "collect 3", "answer 3", "collect 4", "answer 4",
    ]  # fmt: skip
    assert len(slept) == 2 * 3 + NUM_LOOKS, "it waited for whichever came first"


def test_a_sender_that_awaits_every_answer_is_answered_without_looking_twice(request_a):
    device, plans = Device(), [prefill(request_a, step) for step in (1, 2, 3)]
    channel = Channel(device, plans, window=1)
    _Launching(device, channel, sleep=lambda _: pytest.fail("it polled")).answer_plans()
    assert device.notes == [f"{what} {n}" for n in (1, 2, 3) for what in ("launch", "collect", "answer")]


def test_what_is_computed_is_answered_before_the_next_is_launched_which_knows_its_token(request_a):
    device = Device(1, 2)
    served(device, two_plans(request_a))
    assert device.notes == ["launch 1", "collect 1", "answer 1", "launch 2", "collect 2", "answer 2"]
    assert device.tokens == {1: [2], 2: [101]}


def test_a_plan_that_grants_nothing_is_answered_in_its_turn(request_a):
    device = Device()
    channel = served(device, [prefill(request_a), Plan(2, ()), Plan(3, ())])
    assert channel.sent == [(RESULT, 1, [101], {}, {}), (RESULT, 2, [], {}, {}), (RESULT, 3, [], {}, {})]
    assert device.notes == ["launch 1", "collect 1", "answer 1", "answer 2", "answer 3"]


@pytest.mark.parametrize("how", ["refused", "outcomes"])
def test_a_step_that_raises_is_answered_in_its_turn_and_the_next_is_computed(how, request_a):
    device = Device(**{how: {1: ValueError("a bug")}})
    channel = served(device, two_plans(request_a))
    assert [message[:2] for message in channel.sent] == [(STEP_FAILED, 1), (RESULT, 2)]
    # Where it could not be launched nothing is on the device, and the token that never was is any.
    assert device.tokens[2] == ([ANY_TOKEN_ID] if how == "refused" else [None])


def test_one_that_cannot_be_launched_behind_another_fails_after_it(request_a):
    device = Device(refused={2: ValueError("a bug")})
    plans = [*two_plans(request_a), decode(request_a, 3)]
    channel = served(device, plans)
    assert [message[:2] for message in channel.sent] == [(RESULT, 1), (STEP_FAILED, 2), (RESULT, 3)]
    assert device.notes[:4] == ["launch 1", "launch 2", "collect 1", "answer 1"]


def test_a_row_that_failed_leaves_any_token_to_the_step_behind_it(request_a):
    failed = StepResult({}, {RequestId("a"): InternalError("f00d")})
    device = Device(outcomes={1: failed})
    channel = Channel(device, two_plans(request_a))
    answer_plans(device, channel)
    kind, step, sampled, failures, _ = channel.sent[0]
    assert (kind, step, sampled, list(failures)) == (RESULT, 1, [None], ["a"])
    assert channel.sent[1][:3] == (RESULT, 2, [102])


@pytest.mark.parametrize("how", ["refused", "outcomes"])
def test_a_device_that_breaks_in_the_second_step_has_answered_the_first(how, request_a):
    device = Device(**{how: {2: ModelBroken("it fell off the bus")}})
    channel = Channel(device, two_plans(request_a))
    with pytest.raises(ModelBroken, match="off the bus"):
        answer_plans(device, channel)
    assert [message[:2] for message in channel.sent] == [(RESULT, 1)]


def test_a_device_that_breaks_in_the_first_step_answers_nothing(request_a):
    device = Device(outcomes={1: ModelBroken("it fell off the bus")})
    channel = Channel(device, two_plans(request_a))
    with pytest.raises(ModelBroken):
        answer_plans(device, channel)
    assert channel.sent == []


def test_a_model_that_computes_on_its_thread_is_given_one_plan_at_a_time(request_a):
    model = ScriptedModel(ScriptedSource(8, 4))
    device, notes = Device(), []
    channel = Channel(device, two_plans(request_a), window=1)
    model.run = lambda plan, run=model.run: (notes.append(list(plan.grants[0].token_ids)), run(plan))[1]
    answer_plans(model, channel)
    assert not isinstance(model, LaunchingModel)
    assert [message[:2] for message in channel.sent] == [(RESULT, 1), (RESULT, 2)]
    assert notes == [[1, 2], channel.sent[0][2]]
