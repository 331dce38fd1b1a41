"""The simulator against measured serving runs.

A measured run is replayed: its arrivals and lengths go in, its latencies are
compared with the simulated ones. Only the settings of the run are taken over.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.runner.simulated import SimulatedRunner
from engine.scheduler.config import SchedulerConfig
from engine.sim.configurations import BASE, LIKE_VLLM, build
from engine.sim.profiles import profile_named
from engine.sim.simulator import simulate
from workloads import statistics
from workloads.arrivals import Arrival, Workload
from workloads.records import RequestRecord
from workloads.traces import MeasuredRequest, read_measured


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """How a run was made.

    Attributes:
        name: for the report.
        file: its requests, see ``read_measured``.
        profile: hardware.
        num_blocks: KV blocks.
        config: of the scheduler.
    """

    name: str
    file: str
    profile: str
    num_blocks: int
    config: SchedulerConfig


#: vLLM 0.19.0, 300 ShareGPT requests at about 10 a second, Llama-3.1-8B bf16 (LLMServingSim, KAIST, MIT).
MEASURED_RUNS = {
    run.profile: run
    for run in (
        MeasuredRun(
            "RTX 4090",
            "rtx4090_llama31_8b_vllm019_requests.jsonl.gz",
            "rtx4090",
            2588,
            build({**BASE, **LIKE_VLLM, "policy": "fcfs"}),
        ),
        MeasuredRun(
            "RTX PRO 6000",
            "rtxpro6000_llama31_8b_vllm019_requests.jsonl.gz",
            "rtxpro6000",
            35_000,
            build({**BASE, **LIKE_VLLM, "policy": "fcfs", "max_running_requests": 128}),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """One latency, measured and simulated, request by request in order of arrival; seconds."""

    measured: tuple[float, ...]
    simulated: tuple[float, ...]

    @property
    def error(self) -> float:
        """Simulated mean over measured mean, less one."""
        return _mean(self.simulated) / _mean(self.measured) - 1

    def __str__(self) -> str:
        means = f"{_mean(self.measured):.4f} s measured, {_mean(self.simulated):.4f} s simulated"
        return f"{means} ({self.error:+.1%})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run and its replay.

    Attributes:
        quantities: TTFT, TPOT, E2E and makespan by name.
        num_requests: compared.
        num_preemptions: in the replay; the file does not have those of the run.
    """

    run: MeasuredRun
    quantities: dict[str, Quantity]
    num_requests: int
    num_preemptions: int


def replay(run: MeasuredRun, path: Path, *, plans_ahead: int = 1) -> Comparison:
    """Replay a measured run.

    Args:
        run: how it was made.
        path: its requests.
        plans_ahead: 1 as in vLLM 0.19, whose scheduling is asynchronous.
    """
    measured = read_measured(path)
    requests = tuple(
        Arrival(index, m.arrival_s, m.num_prompt_tokens, m.num_output_tokens)
        for index, m in enumerate(measured)
    )
    runner = SimulatedRunner(profile_named(run.profile), num_blocks=run.num_blocks)
    recording = simulate(Workload(run.name, tuple(requests)), runner, run.config, plans_ahead=plans_ahead)
    simulated = list(recording.records.values())

    def quantity(
        of_measured: Callable[[MeasuredRequest], float], of_record: Callable[[RequestRecord], float | None]
    ) -> Quantity:
        values = [of_record(record) for record in simulated]
        return Quantity(tuple(map(of_measured, measured)), tuple(v for v in values if v is not None))

    return Comparison(
        run,
        {
            "TTFT": quantity(lambda m: m.first_token_s - m.arrival_s, statistics.ttft_s),
            "TPOT": quantity(
                lambda m: (m.last_token_s - m.first_token_s) / (m.num_output_tokens - 1), statistics.tpot_s
            ),
            "E2E": quantity(lambda m: m.last_token_s - m.arrival_s, statistics.e2e_s),
            "makespan": Quantity((max(m.last_token_s for m in measured),), (recording.end_s,)),
        },
        len(simulated),
        recording.preemptions.total(),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
