import math

import pytest

from engine.errors import InvalidRequest
from engine.events import Finished, Preempted, Resumed, Started, TokensSampled
from engine.request import FinishReason, PreemptReason, RequestId, Usage
from engine.sim.metrics import report
from engine.sim.recorder import Recorder
from tests.support.grants import grant as new_grant
from workloads.arrivals import Arrival
from workloads.errors import InvalidWorkload
from workloads.statistics import TARGETS, Distribution, Target, distribution, parse_target

URGENT, LAZY = -10, 10


class Story:
    """Tells a recorder what happened."""

    def __init__(self):
        self.recorder = Recorder()

    def arrive(self, index, at, *, prompt=4, output=3, level=0):
        self.recorder.arrived(Arrival(index, at, prompt, output, level))

    def events(self, at, *events):
        self.recorder.happened(events, at)

    def start(self, index, at, cached=0):
        self.events(at, Started(name(index), 4, cached))

    def token(self, index, at, number):
        self.events(at, TokensSampled(name(index), number, (1,)))

    def preempt(self, index, at, reason=PreemptReason.BLOCKS):
        self.events(at, Preempted(name(index), reason, 1, None, 1, 4))

    def resume(self, index, at):
        self.events(at, Resumed(name(index), 4))

    def finish(self, index, at, reason=FinishReason.LENGTH):
        self.events(at, Finished(name(index), reason, Usage()))

    def step(self, at, until, *grants):
        self.recorder.stepped(tuple(grants), at, until)

    def report(self, **targets):
        return report("story", self.recorder.recording, targets)


def name(index):
    return RequestId(f"request-{index}")


def grant(index, start, num_tokens, output_index=None, level=0):
    return new_grant(name(index), start, num_tokens, output_index, level=level)


def one_served(level=0):
    """Arrives at 1, tokens at 3, 4, 7."""
    story = Story()
    story.arrive(0, 1.0, level=level)
    story.start(0, 1.0)
    story.step(1.0, 3.0, grant(0, 0, 4, 0))
    for number, at in enumerate((3.0, 4.0, 7.0)):
        story.token(0, at, number)
    story.step(3.0, 7.0, grant(0, 4, 1, 1))
    story.finish(0, 7.0)
    return story


def test_latencies_of_one_request():
    (part,) = one_served().report().classes
    assert part.ttft_s.p50 == 2.0
    assert part.tpot_s.p50 == 2.0  # (7 - 3) / 2
    assert part.e2e_s.p50 == 6.0
    assert part.longest_stall_s == 3.0


def test_throughput_is_over_the_makespan():
    whole = one_served().report()
    assert whole.makespan_s == 6.0
    assert whole.output_tokens_per_s == 0.5
    assert whole.requests_per_s == pytest.approx(1 / 6)
    assert whole.utilization == 1.0


@pytest.mark.parametrize(
    ("target", "good"),
    [(Target(2.0, 2.0), 1), (Target(1.9, 2.0), 0), (Target(2.0, 1.9), 0), (Target(), 1)],
)
def test_goodput_counts_those_within_all_targets_of_their_class(target, good):
    whole = one_served().report(standard=target)
    assert whole.classes[0].num_good == good
    assert whole.goodput_rps == pytest.approx(good / 6)


def test_a_target_of_another_class_does_not_count():
    assert one_served(URGENT).report(standard=Target(0.0, 0.0)).classes[0].attainment == 1.0


def test_an_output_cut_short_is_neither_served_nor_good():
    story = Story()
    story.arrive(0, 0.0, output=3)
    story.start(0, 0.0)
    story.step(0.0, 1.0, grant(0, 0, 4, 0))
    story.token(0, 1.0, 0)
    story.finish(0, 1.0, FinishReason.CAPACITY)
    whole = story.report()
    assert (whole.num_served, whole.num_cut, whole.goodput_rps) == (0, 1, 0.0)
    assert whole.classes[0].e2e_s.count == 0


def test_a_refused_request_is_counted_against_its_class():
    story = one_served()
    story.recorder.refused(Arrival(1, 2.0, 9, 9), InvalidRequest("prompt", "too long", 9))
    whole = story.report()
    assert (whole.num_requests, whole.num_refused) == (2, 1)
    assert whole.classes[0].attainment == 0.5


def test_recompute_tax_counts_every_position_computed_again():
    story = Story()
    story.arrive(0, 0.0)
    story.start(0, 0.0)
    story.step(0.0, 1.0, grant(0, 0, 4, 0))
    story.preempt(0, 1.0)
    story.resume(0, 1.0)
    story.step(1.0, 2.0, grant(0, 2, 3, 1))  # two found in the cache, 2 and 3 again, 4 anew
    assert story.recorder.recording.num_recomputed_tokens == 2
    assert story.report().recompute_tax == pytest.approx(2 / 7)


def test_a_request_preempted_before_it_caught_up_pays_only_for_what_it_computed():
    story = Story()
    story.arrive(0, 0.0, prompt=8)
    story.start(0, 0.0)
    story.step(0.0, 1.0, grant(0, 0, 8, 0))
    for start in (0, 0):
        story.preempt(0, 1.0)
        story.resume(0, 1.0)
        story.step(1.0, 2.0, grant(0, start, 3))
    assert story.recorder.recording.num_recomputed_tokens == 6


def test_tokens_from_the_prefix_cache_are_not_computed():
    story = Story()
    story.arrive(0, 0.0)
    story.start(0, 0.0, cached=2)
    story.step(0.0, 1.0, grant(0, 2, 2, 0))
    whole = story.report()
    assert (whole.num_computed_tokens, whole.num_recomputed_tokens, whole.num_cached_tokens) == (2, 0, 2)


def test_preemptions_are_counted_by_reason_and_class():
    story = Story()
    story.arrive(0, 0.0, level=LAZY)
    for reason in (PreemptReason.BLOCKS, PreemptReason.BLOCKS, PreemptReason.GROWTH):
        story.start(0, 0.0)
        story.preempt(0, 1.0, reason)
    whole = story.report()
    assert whole.preemptions == {"blocks": 2, "growth": 1}
    assert (whole.num_preemptions, whole.classes[0].num_preemptions) == (3, 3)


def inverted(level_running, level_waiting, running=None):
    story = Story()
    story.arrive(0, 0.0, level=level_running)
    story.start(0, 0.0)
    story.arrive(1, 0.0, level=level_waiting)
    story.step(0.0, 2.0, running or grant(0, 0, 4, level=level_running))
    return story.report()


def test_a_prefill_while_a_more_urgent_request_waits_is_an_inversion():
    whole = inverted(LAZY, URGENT)
    assert (whole.num_inversions, whole.inversion_s) == (1, 2.0)


def test_a_decode_while_a_more_urgent_request_waits_costs_time_but_is_no_inversion():
    whole = inverted(LAZY, URGENT, grant(0, 4, 1, 1, level=LAZY))
    assert (whole.num_inversions, whole.inversion_s) == (0, 2.0)


@pytest.mark.parametrize(("running", "waiting"), [(LAZY, LAZY), (URGENT, LAZY)])
def test_equals_and_less_urgent_ones_that_wait_are_no_inversion(running, waiting):
    whole = inverted(running, waiting)
    assert (whole.num_inversions, whole.inversion_s) == (0, 0.0)


def test_a_request_stops_waiting_when_it_ends_in_the_queue():
    story = Story()
    story.arrive(0, 0.0, level=LAZY)
    story.start(0, 0.0)
    story.arrive(1, 0.0, level=URGENT)
    story.finish(1, 0.0, FinishReason.CANCELLED)
    story.step(0.0, 1.0, grant(0, 0, 4, level=LAZY))
    assert story.report().num_inversions == 0


def test_percentiles_are_linear_between_neighbours():
    got = distribution([4.0, 1.0, 3.0, 2.0])
    assert got == Distribution(
        count=4, mean=2.5, p50=2.5, p90=pytest.approx(3.7), p99=pytest.approx(3.97), max=4.0
    )


def test_nothing_has_no_percentiles():
    assert distribution([]) == Distribution(0)


def test_classes_without_requests_are_left_out_and_the_most_urgent_comes_first():
    story = Story()
    story.arrive(0, 0.0, level=LAZY)
    story.arrive(1, 0.0, level=URGENT)
    assert [part.name for part in story.report().classes] == ["interactive", "batch"]


def test_targets_are_read_from_text():
    assert parse_target("interactive=1.5/0.05") == ("interactive", Target(1.5, 0.05))
    assert parse_target("batch=/0.2") == ("batch", Target(math.inf, 0.2))
    for wrong in ("vip=1/1", "batch=x", "1/1"):
        with pytest.raises(InvalidWorkload):
            parse_target(wrong)


def test_every_class_has_a_target():
    assert set(TARGETS) == {"interactive", "standard", "batch"}
