"""How evenly tenants are served on a real trace; the table is made by ``bench/fairness.py``."""

import pytest

from bench.fairness import BAR, TRACE, measure, summed_difference
from tests.support.traces import trace
from workloads.arrivals import Arrival
from workloads.records import RequestRecord
from workloads.traces import read_trace


def record(index, tenant, arrival_s, first_token_s, ended_s, num_prompt_tokens=100, num_output_tokens=100):
    arrival = Arrival(index, arrival_s, num_prompt_tokens, num_output_tokens, tenant=tenant)
    return RequestRecord(arrival, first_token_s=first_token_s, ended_s=ended_s)


def test_a_tenant_misses_what_the_one_served_most_got_more_as_far_as_it_asked_for_it():
    served_most = [record(i, "a", 31.0, 30.0 + 10 * i, 40.0 + 10 * i) for i in range(4)]  # 1,200 tokens
    half_outside = record(4, "b", 20.0, 80.0, 100.0)  # 150 in the window, nothing asked for in it
    waits = [record(5 + i, "c", 32.0, None, None) for i in range(2)]  # asks for 600
    small = record(9, "d", 40.0, 41.0, 42.0, 10, 5)
    missing = {"b": 150.0, "c": 600.0, "d": 0.0}
    difference = summed_difference([*served_most, half_outside, *waits, small], 30.0)
    assert difference == pytest.approx(sum(missing.values()) / 60)


def check(configuration):
    fairness = measure(read_trace(trace(TRACE)), configuration)
    found = (fairness.max_difference, fairness.mean_difference, fairness.variance)
    assert all(value <= most for value, most in zip(found, BAR, strict=True)), found


@pytest.mark.slow
def test_fair_serves_tenants_about_as_evenly_as_vtc():
    check("fair")


@pytest.mark.deep
def test_fair_does_so_with_prefills_first():
    check("fair:discipline=prefill_first")


@pytest.mark.deep
def test_first_come_first_served_does_not():
    with pytest.raises(AssertionError):
        check("fcfs")
