"""How evenly tenants are served on VTC's real trace: its table made again in virtual time.

    PYTHONPATH=.:protos python bench/fairness.py [--traces ../shared/traces] [--folder build]

1,500 requests of 27 clients of Chatbot Arena in ten minutes, for a device that needs thirteen
minutes for them; the three busiest clients send half. Trace, device and metric are those of the public
artefact of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, and so are the
figures beside ours. The trace is kept beside the project; where it is not, one line says so.

The artefact has no ageing (its requests wait for minutes, and whoever is starved is served by
arrival, whatever its tenant got), so its rows are made without; one more row says what ageing does.
"""

import argparse
import json
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.runner.simulated import SimulatedRunner
from engine.sim.configurations import Value, parse_configuration
from engine.sim.profiles import HardwareProfile
from engine.sim.recorder import Recording
from engine.sim.simulator import simulate
from workloads.arrivals import Workload
from workloads.records import RequestRecord
from workloads.traces import read_trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
TRACE = "vtc/chatbot_arena_27clients_10min.csv.gz"

#: Cost of an output token in prompt tokens.
OUTPUT_TOKEN_COST = 2
#: The metric's window, and when the first and the last begin, in seconds; one every half a window.
WINDOW_S, FIRST_S, LAST_S = 60.0, 30.0, 570.0

#: A step of B decodes takes 27.0 + 0.153 B + 0.00149 x KV tokens ms, a prompt token 0.2136 ms. The
#: dense layers' term counts decodes as well, so the term of sequences takes that back.
A10G = HardwareProfile(
    name="a10g",
    description="A10G, Llama-2-7B",
    weights_ms=27.0,
    base_ms=27.0,
    token_ms=0.2136,
    kv_token_us=1.49,
    num_blocks=625,
    sequences_ms=((0, 0.0), (1000, 1000 * (0.153 - 0.2136))),
    source="VTC's artefact",
)
#: As many seats and prompt tokens a step as the artefact has.
LIKE_VTC: dict[str, Value] = {
    "max_running_requests": 1000,
    "max_step_tokens": 3072,
    "max_chunk_tokens": 3072,
    "max_wait_s": 1e9,
}
ROWS = {
    "`fcfs`": "fcfs",
    "`fair`": "fair",
    "`fair`, `prefill_first`": "fair:discipline=prefill_first",
    "`fair`, ageing as by default": "fair:max_wait_s=120",
}
#: What `fair` must keep to.
BAR = (450.0, 270.0, 9000.0)


@dataclass(frozen=True, slots=True)
class Fairness:
    """How far apart tenants were served; (prompt + 2 output) tokens a second.

    Attributes:
        max_difference, mean_difference, variance: of the summed differences over time.
        tokens_per_s: prompt and output tokens by the time all took.
    """

    max_difference: float
    mean_difference: float
    variance: float
    tokens_per_s: float


#: Published figures, or made by running the artefact's own code.
PUBLISHED = {
    "FCFS (artefact)": Fairness(760, 434, 32112, 777),
    "least counter first, no lift (artefact)": Fairness(750, 324, 29089, 778),
    "VTC (artefact)": Fairness(368, 252, 6549, 779),
    "VTC, lengths known (artefact)": Fairness(329, 228, 4476, 781),
}


def summed_difference(records: Collection[RequestRecord], begin_s: float) -> float:
    """Over one window, the sum over tenants of what each was served less than the one served most.

    What a tenant did not ask for is not missing: at most the distance between what it asked for and
    what it got counts. A request's service is spread evenly from its first token to its end.
    """
    end_s = begin_s + WINDOW_S
    served = dict.fromkeys((record.request.tenant for record in records), 0.0)
    requested = dict.fromkeys(served, 0.0)
    for record in records:
        request = record.request
        service = request.num_prompt_tokens + OUTPUT_TOKEN_COST * request.num_output_tokens
        if begin_s <= request.arrival_s <= end_s:
            requested[request.tenant] += service
        first_s, last_s = record.first_token_s, record.ended_s
        if first_s is None or last_s is None or last_s - first_s < 1e-5:  # as the artefact counts
            continue
        overlap_s = max(0.0, min(end_s, last_s) - max(begin_s, first_s))
        served[request.tenant] += service * overlap_s / (last_s - first_s)
    most = max(served.values())
    missing = (min(most - got, abs(requested[tenant] - got)) for tenant, got in served.items())
    return sum(missing) / WINDOW_S


def fairness_of(recording: Recording) -> Fairness:
    """The table's figures of a run."""
    records = list(recording.records.values())
    num_windows = round((LAST_S - FIRST_S) / (WINDOW_S / 2)) + 1
    differences = [summed_difference(records, FIRST_S + i * WINDOW_S / 2) for i in range(num_windows)]
    num_tokens = sum(r.request.num_prompt_tokens + r.num_output_tokens for r in records)
    return Fairness(
        max(differences),
        statistics.fmean(differences),
        statistics.pvariance(differences),
        num_tokens / recording.end_s,
    )


def measure(workload: Workload, configuration: str) -> Fairness:
    """Simulate the trace under a configuration."""
    config = parse_configuration(configuration, LIKE_VTC).config
    return fairness_of(simulate(workload, SimulatedRunner(A10G), config))


def figures_of(fairness: Fairness) -> dict[str, float]:
    """As JSON has it."""
    return {name: round(getattr(fairness, name), 1) for name in Fairness.__slots__}


def main() -> None:
    """Simulate, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    options = parser.parse_args()
    console = Console()
    path = options.traces / TRACE
    body: dict[str, Any]
    if path.is_file():
        workload = read_trace(path)
        body = {"rows": {name: figures_of(measure(workload, text)) for name, text in ROWS.items()}}
        body["published"] = {name: figures_of(row) for name, row in PUBLISHED.items()}
        table = Table(title="difference in service between 27 tenants, (prompt + 2 output) tokens/s")
        table.add_column("what")
        for column in ("max", "mean", "variance", "tokens/s"):
            table.add_column(column, justify="right")
        for name, row in (body["rows"] | body["published"]).items():
            table.add_row(name, *(f"{value:,.0f}" for value in row.values()))
        console.print(table)
    else:
        body = {"skipped": f"the trace {TRACE} is not there"}
        console.print(f"skipped: {body['skipped']}; say where with --traces")
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "bench-fairness.json").write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
