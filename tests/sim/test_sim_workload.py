import gzip
import json

import pytest

from engine.sim.requests import spec_of
from workloads.arrivals import Arrival, Workload
from workloads.errors import InvalidWorkload
from workloads.mixes import synthetic
from workloads.traces import read_measured, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.1805907,396,109
2023-11-16 18:15:48.6805900,879,0
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 27, "input_length": 700, "output_length": 6, "hash_ids": [7, 9]},
]


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure_traces_are_sorted_and_start_at_zero(tmp_path, name):
    workload = read_trace(write(tmp_path / name, AZURE))
    got = [(r.index, r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in workload.requests]
    assert got == [
        (0, 0.0, 374, 44),
        (1, pytest.approx(2.0), 879, 1),  # no output is still a forward pass
        (2, pytest.approx(3.5), 396, 109),
    ]


def test_mooncake_prompts_share_what_their_hash_ids_share(tmp_path):
    first, second = read_trace(write(tmp_path / "t.jsonl.gz", jsonl(MOONCAKE))).requests
    assert second.arrival_s == pytest.approx(0.027)
    a, b = first.prompt_token_ids(), second.prompt_token_ids()
    assert (len(a), len(b)) == (1000, 700)
    assert a[:512] == b[:512]
    assert not set(a[512:]) & set(b[512:])


def test_mooncake_arrivals_on_a_coarse_raster_are_spread_over_it(tmp_path):
    rows = [MOONCAKE[0] | {"timestamp": t} for t in (0, 0, 0, 3000, 9000)]
    times = [r.arrival_s for r in read_trace(write(tmp_path / "t.jsonl", jsonl(rows))).requests]
    assert times == pytest.approx([0.0, 1.0, 2.0, 3.0, 9.0])


def test_prompts_without_hash_ids_share_nothing():
    a, b = Arrival(0, 0.0, 40, 1), Arrival(1, 0.0, 40, 1)
    assert len(a.prompt_token_ids()) == 40
    assert not set(a.prompt_token_ids()) & set(b.prompt_token_ids())


def test_a_prompt_longer_than_its_hash_ids_ends_uniquely():
    a, b = (Arrival(i, 0.0, 20, 1, hash_ids=(3,), hash_block_tokens=16) for i in range(2))
    assert a.prompt_token_ids()[:16] == b.prompt_token_ids()[:16]
    assert not set(a.prompt_token_ids()[16:]) & set(b.prompt_token_ids()[16:])


def test_tenants_of_a_trace_do_not_share_prefixes(tmp_path):
    text = "arrival_s,client,prompt_tokens,output_tokens\n0.5,3,10,20\n1.5,4,11,21\n"
    first, second = read_trace(write(tmp_path / "t.csv", text)).requests
    assert (first.tenant, spec_of(first).cache_salt) == ("client-3", "client-3")
    assert spec_of(second).cache_salt == "client-4"


def test_measured_runs_are_put_on_one_clock(tmp_path):
    rows = [
        {"request_id": "a", "input_toks": 10, "output_toks": 3, "arrival_time": 1000.0, "queued_ts": 50.2,
         "scheduled_ts": 50.2, "first_token_ts": 50.5, "last_token_ts": 51.0},
        {"request_id": "b", "input_toks": 11, "output_toks": 4, "arrival_time": 1000.3, "queued_ts": 50.4,
         "scheduled_ts": 50.5, "first_token_ts": 50.7, "last_token_ts": 51.5},
    ]  # fmt: skip
    first, second = read_measured(write(tmp_path / "run.jsonl", jsonl(rows)))
    # b was queued at once: the clocks are 949.9 s apart.
    assert (first.arrival_s, second.arrival_s) == (0.0, pytest.approx(0.3))
    assert first.first_token_s == pytest.approx(0.4)
    assert second.last_token_s == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("text", "trace_format"),
    [("a,b\n1,2\n", "auto"), (AZURE, "mooncake"), (AZURE, "nonsense"), ("", "azure")],
)
def test_what_is_no_trace_is_refused(tmp_path, text, trace_format):
    with pytest.raises(InvalidWorkload):
        read_trace(write(tmp_path / "t.csv", text), trace_format)


def test_outputs_are_forced_to_their_length():
    sampling = spec_of(Arrival(0, 0.0, 10, 321)).sampling
    assert (sampling.max_tokens, sampling.ignore_eos) == (321, True)


def test_the_same_seed_makes_the_same_mix_and_another_another():
    def make(seed):
        return synthetic("steady", duration_s=60, seed=seed).requests

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert [r.arrival_s for r in make(1)] == sorted(r.arrival_s for r in make(1))


def test_a_mix_keeps_its_rates_and_medians():
    requests = synthetic("saturated", duration_s=4000, seed=0).requests
    interactive = sorted(r.num_prompt_tokens for r in requests if r.level < 0)
    assert len(interactive) == pytest.approx(0.5 * 4000, rel=0.06)
    assert interactive[len(interactive) // 2] == pytest.approx(500, rel=0.06)


def test_classes_are_drawn_in_their_shares_and_by_seed():
    plain = Workload("w", tuple(Arrival(i, float(i), 10, 10) for i in range(5000)))
    drawn = plain.with_classes({"interactive": 0.2, "batch": 0.8}, seed=3)
    assert sum(r.level == -10 for r in drawn.requests) / 5000 == pytest.approx(0.2, abs=0.02)
    assert {r.level for r in drawn.requests} == {-10, 10}
    assert drawn == plain.with_classes({"interactive": 0.2, "batch": 0.8}, seed=3)


@pytest.mark.parametrize("shares", [{"interactive": 0.5}, {"interactive": 1.5, "batch": -0.5}, {}])
def test_shares_that_are_no_shares_are_refused(shares):
    with pytest.raises(InvalidWorkload):
        Workload("w", (Arrival(0, 0.0, 1, 1),)).with_classes(shares, 0)


def test_an_unknown_class_is_refused():
    with pytest.raises(InvalidWorkload, match="must be one of"):
        Workload("w", (Arrival(0, 0.0, 1, 1),)).with_classes({"vip": 1.0}, 0)


def test_workloads_are_cut_and_scaled():
    whole = Workload("w", tuple(Arrival(i, 2.0 * i, 10 * (i + 1), 1) for i in range(4)))
    assert [r.index for r in whole.limited(2).requests] == [0, 1]
    assert [r.arrival_s for r in whole.scaled(4.0).requests] == [0.0, 0.5, 1.0, 1.5]
    assert [r.index for r in whole.with_prompts_up_to(20).requests] == [0, 1]
    with pytest.raises(InvalidWorkload):
        whole.scaled(0.0)
