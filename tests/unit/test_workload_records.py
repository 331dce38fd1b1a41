import json

import pytest

from engine import priority
from workloads import classes
from workloads.arrivals import Arrival
from workloads.errors import InvalidWorkload
from workloads.records import RequestRecord, Run, Sample, read_runs, write_runs


def run():
    request = Arrival(3, 1.5, 100, 2, level=-10, tenant="a", hash_ids=(1, 2), label="completion")
    record = RequestRecord(request, sent_s=1.6, accepted_s=1.7, token_times_s=[2.0, 2.5], reason="length")
    record.got_tokens(1, 2.0)
    record.got_tokens(1, 2.5)
    refused = RequestRecord(Arrival(4, 2.0, 9, 9), error="QUEUE_FULL", error_message="the queue is full")
    sample = Sample(2.0, 1, 0, 0.25, waiting_by_class={"batch": 0})
    return Run(
        "priority", "chat", 2.5, seed=7, end_s=2.5, command="vorrangctl bench", versions={"vorrang": "0.1"},
        figures={"num_steps": 2}, records=[record, refused], samples=[sample],
    )  # fmt: skip


def test_runs_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "runs.jsonl"
    runs = [run(), Run("fcfs")]
    write_runs(path, runs)
    assert read_runs(path) == runs
    assert len(path.read_text().splitlines()) == 5


def test_a_field_of_a_later_version_is_passed_over(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"kind": "run", "name": "x", "colour": "red"}) + "\n")
    assert read_runs(path) == [Run("x")]


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"kind": "sample"}', '{"kind": "tea"}', '{"kind": "run"}']
)
def test_a_line_that_is_no_record_is_refused_by_its_number(tmp_path, line):
    path = tmp_path / "runs.jsonl"
    write_runs(path, [run()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InvalidWorkload, match=r"runs\.jsonl line 5 must be"):
        read_runs(path)


def test_tokens_that_come_late_are_a_stall():
    (record, _) = run().records
    assert (record.first_token_s, record.last_token_s, record.longest_stall_s) == (2.0, 2.5, 0.5)
    record.got_tokens(3, 4.0)
    assert (record.num_output_tokens, record.longest_stall_s) == (5, 1.5)


def test_classes_are_the_engines():
    assert {c.name: c.level for c in priority.CLASSES} == classes.LEVELS
    assert (classes.LEVEL_MIN, classes.LEVEL_MAX) == (priority.LEVEL_MIN, priority.LEVEL_MAX)
    assert classes.DEFAULT_LEVEL == priority.DEFAULT_LEVEL
    for level in range(priority.LEVEL_MIN, priority.LEVEL_MAX + 1):
        assert classes.class_of(level) == priority.class_of(level).name


@pytest.mark.parametrize("vocab_size", [4, 258, 49_152, 2**31])
def test_prompts_differ_from_their_first_block_in_any_vocabulary(vocab_size):
    prompts = [Arrival(i, 0.0, 64, 1).prompt_token_ids(vocab_size) for i in range(2000)]
    assert len({prompt[:48] for prompt in prompts}) == 2000
    assert all(len(prompt) == 64 and min(prompt) >= 0 and max(prompt) < vocab_size for prompt in prompts)
    shared = [Arrival(i, 0.0, 64, 1, hash_ids=(5,), hash_block_tokens=48) for i in range(2)]
    shared = [arrival.prompt_token_ids(vocab_size) for arrival in shared]
    assert shared[0][:48] == shared[1][:48]
    assert shared[0][:48] not in {prompt[:48] for prompt in prompts}
    assert shared[0][48:] != shared[1][48:]
