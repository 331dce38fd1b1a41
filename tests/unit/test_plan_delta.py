"""Plans as differences: what comes out at the far end is what went in."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request, RequestId, RequestSpec
from engine.runner.delta import ANY_TOKEN_ID, SWEEP_PLANS, PlanDecoder, PlanEncoder
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan
from tests.support.drive import Driver


def seen(grant):
    """All that a runner may look at."""
    num_blocks = len(grant.block_table)
    return (
        grant.request_id, grant.start, grant.num_tokens, grant.output_index, list(grant.token_ids),
        list(grant.block_table[:num_blocks]), grant.sampling, grant.banned_token_ids,
        grant.request.ending_token_ids, grant.request.adapter,
        grant.request.token_ids[: grant.start + grant.num_tokens],
    )  # fmt: skip


def sent(encoder, plan):
    return pickle.loads(pickle.dumps(encoder.encode(plan), pickle.HIGHEST_PROTOCOL))


class Ends:
    """An encoder and a decoder, which must always agree."""

    def __init__(self):
        self.restart()

    def restart(self):
        self.encoder, self.decoder = PlanEncoder(), PlanDecoder()

    def check(self, plan):
        made = self.decoder.decode(sent(self.encoder, plan))
        assert made.step == plan.step
        assert [seen(grant) for grant in made.grants] == [seen(grant) for grant in plan.grants]


class CheckingRunner:
    """In the place of the driver's runner: looks at every plan before it is computed."""

    def __init__(self, ends, runner):
        self.ends, self.runner = ends, runner

    def run(self, plan):
        self.ends.check(plan)
        return self.runner.run(plan)


calls = st.lists(
    st.tuples(st.sampled_from(["submit", "step", "step", "preempt", "park", "unpark", "die"]),
              st.integers(0, 9), st.integers(1, 30)),
    max_size=60,
)  # fmt: skip


@given(calls=calls)
def test_any_plan_arrives_as_it_was_made(calls):
    driver, ends = Driver(num_blocks=12, max_running_requests=3), Ends()
    driver.runner = CheckingRunner(ends, driver.runner)
    for what, which, size in calls:
        names = sorted(driver.seen)
        match what:
            case "submit":
                driver.submit(f"r{len(names)}", [which] * size, level=which % 3, min_tokens=which % 4,
                              stop_token_ids=(which,), max_tokens=12, adapter="x" * (which % 2))  # fmt: skip
            case "step" if names:
                for _ in range(which):
                    driver.step()
            case "die":
                driver.lose_kv(from_outside=True)
                ends.restart()
                driver.runner = CheckingRunner(ends, driver.runner)
            case "preempt" | "park" | "unpark" if names:
                getattr(driver, what)(names[which % len(names)])
    for request in driver.scheduler.parked():
        driver.unpark(request.request_id)
    driver.finish()


def test_an_unknown_token_is_what_the_plan_before_sampled_and_is_never_told():
    request = Request(RequestSpec(RequestId("a"), (1, 2), SamplingParams()), 0, 0.0)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    decoder.decode(sent(encoder, Plan(1, (Grant(request, 0, 2, [3], 0),))))
    delta = sent(encoder, Plan(2, (Grant(request, 2, 1, [3], 1),)))
    decoder.sampled({RequestId("a"): 7})
    (grant,) = decoder.decode(delta).grants
    assert (list(grant.token_ids), grant.has_unknown_token) == ([7], False)
    request.token_ids.append(7)
    delta = sent(encoder, Plan(3, (Grant(request, 3, 1, [3], 2),)))
    assert delta[3][0][4] == []  # the token it lacks is unknown again, and the 7 is there
    decoder.sampled({RequestId("a"): 8})
    (grant,) = decoder.decode(delta).grants
    assert grant.request.token_ids == [1, 2, 7, 8]


def test_a_token_that_was_never_sampled_is_any():
    request = Request(RequestSpec(RequestId("a"), (1, 2), SamplingParams()), 0, 0.0)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    decoder.decode(sent(encoder, Plan(1, (Grant(request, 0, 2, [3], 0),))))
    decoder.sampled({RequestId("a"): 7})
    decoder.decode(sent(encoder, Plan(2, ())))  # a sample is for the next plan alone
    (grant,) = decoder.decode(sent(encoder, Plan(3, (Grant(request, 2, 1, [3], 1),)))).grants
    assert list(grant.token_ids) == [ANY_TOKEN_ID]


def test_the_plan_before_may_still_be_computed_and_its_sample_comes_later():
    request = Request(RequestSpec(RequestId("a"), (1, 2), SamplingParams()), 0, 0.0)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    decoder.decode(sent(encoder, Plan(1, (Grant(request, 0, 2, [3], 0),))))
    (second,) = decoder.decode(sent(encoder, Plan(2, (Grant(request, 2, 1, [3], 1),))), is_ahead=True).grants
    assert (list(second.token_ids), second.has_unknown_token) == ([], True)
    decoder.sampled({RequestId("a"): 7})
    assert (list(second.token_ids), second.has_unknown_token) == ([7], False)
    request.token_ids.append(7)
    (third,) = decoder.decode(sent(encoder, Plan(3, (Grant(request, 3, 1, [3], 2),))), is_ahead=True).grants
    decoder.sampled({})
    assert third.request.token_ids == [1, 2, 7, ANY_TOKEN_ID]


def test_a_token_that_was_never_sampled_is_told_once_it_has_been():
    request = Request(RequestSpec(RequestId("a"), (1, 2), SamplingParams()), 0, 0.0)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    decoder.decode(sent(encoder, Plan(1, (Grant(request, 0, 2, [3], 0),))))
    decoder.decode(sent(encoder, Plan(2, (Grant(request, 2, 1, [3], 1),))))  # and the first plan failed
    again = Plan(3, (Grant(request, 0, 2, [4], 0),))
    assert seen(decoder.decode(sent(encoder, again)).grants[0]) == seen(again.grants[0])
    request.token_ids.append(7)
    after = Plan(4, (Grant(request, 2, 1, [4], 1),))
    assert seen(decoder.decode(sent(encoder, after)).grants[0]) == seen(after.grants[0])
    assert decoder.num_known == 1


def decode_plan(step, request, table):
    return Plan(step, (Grant(request, len(request.token_ids) - 1, 1, table, 0),))


def test_a_decode_is_a_few_numbers():
    request = Request(RequestSpec(RequestId("a"), tuple(range(1000)), SamplingParams()), 0, 0.0)
    table, encoder = list(range(63)), PlanEncoder()
    whole = len(pickle.dumps(encoder.encode(decode_plan(1, request, table))))
    request.token_ids.append(7)
    table.append(99)
    delta = encoder.encode(decode_plan(2, request, table))
    assert delta == (2, (), [], [(0, 1000, 1, 0, [7], 63, [99], ())])
    assert len(pickle.dumps(delta)) < 80 < whole


def test_who_is_not_granted_anything_for_long_is_forgotten_at_both_ends():
    encoder, decoder = PlanEncoder(), PlanDecoder()
    requests = [Request(RequestSpec(RequestId(n), (1, 2), SamplingParams()), 0, 0.0) for n in "ab"]
    decoder.decode(sent(encoder, decode_plan(0, requests[0], [3])))
    for step in range(1, 2 * SWEEP_PLANS):
        decoder.decode(sent(encoder, decode_plan(step, requests[1], [4])))
    assert decoder.num_known == 1
    plan = decode_plan(0, requests[0], [3])
    assert seen(decoder.decode(sent(encoder, plan)).grants[0]) == seen(plan.grants[0])
