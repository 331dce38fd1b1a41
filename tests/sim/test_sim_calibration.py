"""The simulator against measured serving runs; no constant was fitted to them."""

import pytest

from engine.sim.calibration import MEASURED_RUNS, replay
from tests.support.traces import trace
from workloads.traces import FORMATS, read_trace


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "tolerance"),
    [
        ("rtx4090", 0.05),
        # Never looked at when the model was made; its TTFT is a small difference of large flows.
        ("rtxpro6000", 0.06),
    ],
)
def test_replaying_a_measured_run_gives_its_mean_latencies(run, tolerance):
    setup = MEASURED_RUNS[run]
    comparison = replay(setup, trace(f"calibration/{setup.file}"))
    for name, quantity in comparison.quantities.items():
        assert abs(quantity.error) <= tolerance, f"{name}: {quantity}"
    assert comparison.num_requests == 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trace_format", "num_requests"),
    [
        ("azure/azure_llm_2023_code.csv.gz", "azure", 8819),
        ("azure/azure_llm_2023_conv.csv.gz", "azure", 19366),
        ("mooncake/synthetic_trace.jsonl.gz", "mooncake", 3993),
        ("vtc/chatbot_arena_27clients_10min.csv.gz", "vtc", 1500),
    ],
)
def test_real_traces_are_read_whole_and_recognised(name, trace_format, num_requests):
    path = trace(name)
    workload = read_trace(path)
    assert len(workload.requests) == num_requests
    assert workload.requests == read_trace(path, trace_format).requests
    assert trace_format in FORMATS
