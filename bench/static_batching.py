"""What continuous batching buys over static batches, with the real scheduler in virtual time.

    PYTHONPATH=.:protos python bench/static_batching.py [--folder build]

*Classic*: four requests of 10, 50, 100 and 500 output tokens on four seats, a step
always takes 20 ms, and a fifth request arrives at step 20. *Lengths*: 256 requests with
log-normal prompts and outputs, all there at the start, on 32 seats of the RTX 4090
profile, and one more arriving when a tenth of the work is done.

A static batch computes rectangles: every row up to the longest prompt, then up to the
longest output of the batch. Continuous batching computes no padding. The *useful share*
is what requests asked for over what is computed. Padding is counted, but not charged in
time: static batching looks better in seconds than it is.
"""

import argparse
import dataclasses
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from engine.events import Started
from engine.runner.simulated import SimulatedRunner
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Plan
from engine.sim.profiles import HardwareProfile, profile_named
from engine.sim.simulator import simulate
from workloads.arrivals import Arrival, Workload

STEP_S = 0.020
CLASSIC_OUTPUTS = (10, 50, 100, 500)
LATE_STEP, LATE_OUTPUT = 20, 50
NUM_REQUESTS, NUM_SEATS = 256, 32
PROMPT_MEDIAN, OUTPUT_MEDIAN, SIGMA = 160, 200, 0.8
STATIC, CONTINUOUS = "static", "continuous"
DISCIPLINES = {STATIC: "static", CONTINUOUS: "unified"}

CONSTANT = HardwareProfile(
    name="constant",
    description=f"every step takes {STEP_S * 1e3:g} ms",
    weights_ms=STEP_S * 1e3,
    base_ms=0.0,
    token_ms=0.0,
    kv_token_us=0.0,
    num_blocks=4096,
    source="made up",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way of batching made of a workload.

    Attributes:
        steps: steps made until the last request ended.
        makespan_s: when the last request ended.
        asked_tokens: prompt and output tokens that had to be computed.
        computed_tokens: tokens computed, padding included.
        seat_use: share of seats that did something, over all steps.
        late_ttft_s: what the late request waited for its first token.
        late_latency_s: and for its last.
        late_wait_steps: steps that began between its arrival and its first computation.
        spans: (request's number, first step, last step), for the plot.
    """

    steps: int
    makespan_s: float
    asked_tokens: int
    computed_tokens: int
    seat_use: float
    late_ttft_s: float
    late_latency_s: float
    late_wait_steps: int
    spans: tuple[tuple[int, int, int], ...]

    @property
    def useful_share(self) -> float:
        """Tokens asked for over tokens computed."""
        return self.asked_tokens / self.computed_tokens


def run(workload: Workload, profile: HardwareProfile, seats: int, way: str) -> Outcome:
    """Let the scheduler batch the workload; its last arrival is the late request.

    Args:
        workload: what arrives.
        profile: what steps cost.
        seats: places in a batch.
        way: a key of ``DISCIPLINES``.
    """
    config = SchedulerConfig(
        policy="fcfs",
        discipline=DISCIPLINES[way],
        max_running_requests=seats,
        max_step_tokens=8192,
        max_chunk_tokens=8192,
        max_context_tokens=8192,
        max_waiting_requests=100_000,
    )
    batches: list[set[str]] = []
    spans: dict[str, list[int]] = {}
    busy_seats = 0
    late = max(workload.requests, key=lambda request: request.arrival_s)

    def see(plan: Plan) -> None:
        nonlocal busy_seats
        admitted = {event.request_id for event in plan.events if isinstance(event, Started)}
        if admitted:
            batches.append(set(admitted))
        busy_seats += len(plan.grants)
        for grant in plan.grants:
            spans.setdefault(grant.request_id, [plan.step, plan.step])[1] = plan.step

    runner = SimulatedRunner(profile)
    recording = simulate(workload, runner, config, enable_prefix_cache=False, on_plan=see)
    assert not recording.preemptions, "the pool is meant to be large enough"
    assert not any(record.error for record in recording.records.values())
    record = recording.records[late.request_id]
    assert record.first_token_s is not None
    assert record.last_token_s is not None
    num_grants = recording.num_computed_tokens
    asked = {r.request_id: (r.num_prompt_tokens, r.num_output_tokens - 1) for r in workload.requests}
    padded = sum(
        len(batch) * (max(asked[name][0] for name in batch) + max(asked[name][1] for name in batch))
        for batch in batches
    )
    index_of = {r.request_id: r.index for r in workload.requests}
    late_first_step = spans[late.request_id][0]
    arrival_step = math.ceil(round(late.arrival_s / recording.end_s * recording.num_steps, 6))
    return Outcome(
        steps=recording.num_steps,
        makespan_s=recording.end_s,
        asked_tokens=sum(map(sum, asked.values())),
        computed_tokens=padded if way == STATIC else num_grants,
        seat_use=busy_seats / (seats * recording.num_steps),
        late_ttft_s=record.first_token_s - late.arrival_s,
        late_latency_s=record.last_token_s - late.arrival_s,
        late_wait_steps=max(0, late_first_step - 1 - arrival_step),
        spans=tuple((index_of[name], first, last) for name, (first, last) in spans.items()),
    )


def classic() -> Workload:
    """Four requests at once, a fifth when step 20 has been made."""
    requests = [Arrival(i, 0.0, 10, output) for i, output in enumerate(CLASSIC_OUTPUTS)]
    late = Arrival(len(requests), LATE_STEP * STEP_S, 10, LATE_OUTPUT)
    return Workload("classic", (*requests, late))


def lengths(seed: int = 1) -> Workload:
    """Requests of many lengths."""
    rng = random.Random(seed)

    def draw(median: int) -> int:
        return max(1, min(2048, round(rng.lognormvariate(math.log(median), SIGMA))))

    requests = [Arrival(i, 0.0, draw(PROMPT_MEDIAN), draw(OUTPUT_MEDIAN)) for i in range(NUM_REQUESTS)]
    return Workload("lengths", tuple(requests))


def with_late(workload: Workload, arrival_s: float) -> Workload:
    """The workload and one more request."""
    late = Arrival(len(workload.requests), arrival_s, PROMPT_MEDIAN, OUTPUT_MEDIAN)
    return dataclasses.replace(workload, requests=(*workload.requests, late))


def measure() -> dict[str, dict[str, Outcome]]:
    """By example, then by way of batching."""
    profile = dataclasses.replace(profile_named("rtx4090"), num_blocks=20_000)
    backlog = with_late(lengths(), 0.0)
    quickest = run(backlog, profile, NUM_SEATS, CONTINUOUS)
    many = with_late(lengths(), quickest.makespan_s / 10)
    return {
        "classic": {way: run(classic(), CONSTANT, len(CLASSIC_OUTPUTS), way) for way in DISCIPLINES},
        "lengths": {way: run(many, profile, NUM_SEATS, way) for way in DISCIPLINES},
    }


def as_table(name: str, outcomes: dict[str, Outcome]) -> Table:
    """One row a way of batching."""
    table = Table(title=name)
    columns = ("batching", "steps", "makespan", "useful share", "seats used", "late TTFT", "late latency")
    for column in columns:
        table.add_column(column, justify="left" if column == "batching" else "right")
    for way, outcome in outcomes.items():
        table.add_row(
            way,
            f"{outcome.steps:,}",
            f"{outcome.makespan_s:.2f} s",
            f"{outcome.useful_share:.1%}",
            f"{outcome.seat_use:.1%}",
            f"{outcome.late_ttft_s:.2f} s",
            f"{outcome.late_latency_s:.2f} s",
        )
    return table


def draw(axes: Axes, title: str, outcome: Outcome, *, padded: bool) -> None:
    """A bar a request, from its first step to its last; the late one in another colour, padding pale."""
    late = len(CLASSIC_OUTPUTS)
    batch_end = max(last for row, _, last in outcome.spans if row != late)
    for row, first, last in outcome.spans:
        if padded and row != late:
            axes.barh(row, batch_end, color="lightgrey")
        axes.barh(row, last - first + 1, left=first - 1, color="tab:orange" if row == late else "tab:blue")
        label = f"{last - first + 1} steps"
        axes.annotate(label, (last, row), (5, 0), textcoords="offset points", va="center")
    axes.axvline(LATE_STEP, color="tab:orange", linestyle=":", label="the fifth arrives")
    axes.set_yticks(range(late + 1), [f"{n} tokens" for n in (*CLASSIC_OUTPUTS, LATE_OUTPUT)])
    axes.invert_yaxis()
    share = f"{outcome.useful_share:.0%} of what is computed is useful"
    axes.set_title(f"{title}: {share}, the fifth is done after {outcome.late_latency_s:.2f} s", fontsize=10)


def plot(outcomes: dict[str, Outcome]) -> Figure:
    """The classic example, both ways, over the same steps."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    draw(upper, "static (grey: padding)", outcomes[STATIC], padded=True)
    draw(lower, CONTINUOUS, outcomes[CONTINUOUS], padded=False)
    lower.set_xlabel(f"step ({STEP_S * 1e3:g} ms each)")
    lower.set_xlim(0, max(outcome.steps for outcome in outcomes.values()) * 1.12)
    lower.legend(loc="lower right")
    return figure


def main() -> None:
    """Measure, print, and write JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    options = parser.parse_args()
    console = Console(width=110)
    examples = measure()
    figures = {}
    for name, outcomes in examples.items():
        console.print(as_table(name, outcomes))
        figures[name] = {
            way: {field: value for field, value in dataclasses.asdict(outcome).items() if field != "spans"}
            | {"useful_share": outcome.useful_share}
            for way, outcome in outcomes.items()
        }
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "bench-static.json").write_text(json.dumps(figures, indent=2) + "\n")
    plot(examples["classic"]).savefig(options.folder / "bench-static.png", dpi=130)
    console.print(f"written: {options.folder}/bench-static.json and .png")


if __name__ == "__main__":
    main()
