import pickle
import tomllib
from collections import Counter

import pytest

from workloads.errors import InvalidWorkload
from workloads.files import parse_workload, read_workload
from workloads.sources import ready_workloads, workload_from

STREAM = """
name = "test"
duration_s = 100
[[stream]]
class = "interactive"
label = "chat"
arrivals = { process = "poisson", rate_rps = 5.0 }
prompt_tokens = { median = 200, sigma = 0.5, max = 1000 }
output_tokens = { min = 10, max = 30 }
"""


def make(text, **more):
    return parse_workload(tomllib.loads(text), **more)


def changed(old, new):
    assert old in STREAM
    return STREAM.replace(old, new)


def test_the_same_seed_makes_the_same_workload_and_another_another():
    assert make(STREAM, seed=1) == make(STREAM, seed=1)
    assert make(STREAM, seed=1).requests != make(STREAM, seed=2).requests


def test_a_stream_keeps_its_rate_lengths_class_and_label():
    requests = make(STREAM).requests
    assert len(requests) == pytest.approx(500, rel=0.15)
    assert all(r.num_prompt_tokens <= 1000 and 10 <= r.num_output_tokens <= 30 for r in requests)
    assert {(r.level, r.label) for r in requests} == {(-10, "chat")}
    assert [r.index for r in requests] == list(range(len(requests)))
    assert max(r.arrival_s for r in requests) < 100


def test_a_stream_more_leaves_the_others_as_they_were():
    more = STREAM + '[[stream]]\nlevel = 3\narrivals = { process = "at_once", num_requests = 7 }\n'
    more += "prompt_tokens = 5\noutput_tokens = 6\n"
    requests = make(more).requests
    first = [(r.arrival_s, r.num_prompt_tokens) for r in requests if r.level == -10]
    assert first == [(r.arrival_s, r.num_prompt_tokens) for r in make(STREAM).requests]
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in requests[:7]] == [(0, 5, 6)] * 7


@pytest.mark.parametrize(
    ("arrivals", "times"),
    [
        ('process = "constant", rate_rps = 0.05', [0, 20, 40, 60, 80]),
        ('process = "bursts", num_requests = 2, first_s = 10, every_s = 60', [10, 10, 70, 70]),
        ('process = "bursts", num_requests = 1', [0]),
    ],
)
def test_processes_that_draw_nothing(arrivals, times):
    requests = make(changed('process = "poisson", rate_rps = 5.0', arrivals)).requests
    assert [r.arrival_s for r in requests] == pytest.approx(times)


def test_gamma_arrivals_of_a_high_variation_come_in_bunches():
    def busiest(process):
        times = [r.arrival_s for r in make(changed('process = "poisson"', process), seed=4).requests]
        return max(Counter(int(t) for t in times).values()), len(times)

    bunched, num_bunched = busiest('process = "gamma", cv = 5.0')
    even, num_even = busiest('process = "gamma", cv = 0.2')
    assert bunched > 2 * even
    assert num_even == pytest.approx(500, rel=0.1)
    assert num_bunched == pytest.approx(500, rel=0.6)


def test_requests_of_one_prefix_group_share_their_start_and_no_more():
    requests = make(STREAM + "prefix = { tokens = 64, groups = 2 }\n").requests[:50]
    starts = Counter(r.prompt_token_ids()[:64] for r in requests)
    assert len(starts) == 2
    assert len({r.prompt_token_ids()[:65] for r in requests}) == 50
    assert min(r.num_prompt_tokens for r in requests) > 64


def test_a_turn_begins_with_the_prompt_before():
    text = changed('process = "poisson", rate_rps = 5.0', 'process = "at_once", num_requests = 1')
    text += "conversation = { turns = 4, think_s = 3.0 }\n"
    first, second, third, _ = make(text).requests
    assert first.arrival_s < second.arrival_s < third.arrival_s
    assert second.num_prompt_tokens > first.num_prompt_tokens + first.num_output_tokens
    for earlier, later in ((first, second), (second, third)):
        whole = earlier.num_prompt_tokens // 16 * 16
        assert later.prompt_token_ids()[:whole] == earlier.prompt_token_ids()[:whole]


def test_tenants_are_drawn_and_a_stream_ends_when_it_says():
    requests = make(STREAM + 'tenants = ["a", "b"]\nstart_s = 10\nend_s = 20\n').requests
    assert {r.tenant for r in requests} == {"a", "b"}
    assert all(10 <= r.arrival_s < 20 for r in requests)
    assert len(make(STREAM, duration_s=10.0).requests) < 90


def test_a_trace_is_a_stream_like_any_other(tmp_path):
    rows = "".join(f"{i},{i % 3},1{i},2\n" for i in range(20))
    (tmp_path / "trace.csv").write_text("arrival_s,client,prompt_tokens,output_tokens\n" + rows)
    path = tmp_path / "w.toml"
    path.write_text(
        'name = "t"\nduration_s = 30\n[[stream]]\ntrace = "trace.csv"\nscale = 0.5\nclass = "batch"\n'
    )
    requests = read_workload(path).requests
    assert [r.arrival_s for r in requests] == [2.0 * i for i in range(15)]  # cut where the file ends
    assert {r.level for r in requests} == {10}
    assert requests[1].tenant == "client-1"


WRONG = [
    (changed('"interactive"', '"vip"'), r"stream\[0\].class must be one of interactive.* got 'vip'"),
    (changed("5.0", "0"), r"stream\[0\].arrivals.rate_rps must be a number greater than 0, got 0"),
    (changed('"poisson"', '"fax"'), r"arrivals.process must be one of poisson.* got 'fax'"),
    (changed("rate_rps = 5.0", "rate = 5.0"), r"arrivals.rate_rps must be a number"),
    (changed("median = 200", "median = 0"), r"prompt_tokens.median must be a number of at least 1, got 0"),
    (
        changed("min = 10", "min = 50"),
        r"output_tokens.max must be a whole number of at least 50 and .*got 30",
    ),
    (changed("{ min = 10, max = 30 }", '"long"'), r"output_tokens must be a whole number.* got 'long'"),
    (changed('label = "chat"', "label = 3"), r"stream\[0\].label must be a text, got 3"),
    (changed('label = "chat"', "colour = 3"), r"stream\[0\].colour is not known here, got 3"),
    (changed("duration_s = 100", "duration_s = -1"), r"duration_s must be a number greater than 0, got -1"),
    (STREAM + "prefix = { tokens = 0 }", r"prefix.tokens must be a whole number of at least 1"),
    (STREAM + "prefix = 7", r"stream\[0\].prefix must be a table, got 7"),
    (STREAM + "tenants = 3", r"stream\[0\].tenants must be a list of names, got 3"),
    (STREAM + "level = 3", r"stream\[0\].level must not stand beside class"),
    (STREAM + "start_s = 200", r"stream\[0\].end_s must be a number greater than 200, got 100"),
    ('name = "x"\nduration_s = 1', r"stream must be one or more tables"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_a_mistake_is_named_by_field_rule_and_value(text, says):
    with pytest.raises(InvalidWorkload, match=says):
        make(text)


def test_a_mistake_may_be_found_in_another_process():
    error = pickle.loads(pickle.dumps(InvalidWorkload("rate", "must be greater than 0", -1)))
    assert (str(error), error.value) == ("rate must be greater than 0, got -1", -1)


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    path = tmp_path / "w.toml"
    path.write_text("name = ")
    with pytest.raises(InvalidWorkload, match="must be TOML"):
        workload_from(str(path))


def test_what_is_neither_a_file_nor_a_name_is_refused():
    with pytest.raises(InvalidWorkload, match=r"must be a file or one of .*tenant-flood.*steady"):
        workload_from("nothing")


@pytest.mark.parametrize("name", sorted(ready_workloads()))
def test_ready_workloads_can_be_made(name):
    workload = workload_from(name, seed=5)
    assert workload == workload_from(name, seed=5)
    assert 50 < len(workload.requests) < 2000
    assert len({r.label for r in workload.requests}) == 2


def test_the_ready_ones_are_the_six():
    assert set(ready_workloads()) == {
        "interactive-and-batch", "completion-burst", "chat-with-shared-prefixes",
        "long-prompt-intruder", "tenant-flood", "urgent-flood",
    }  # fmt: skip
