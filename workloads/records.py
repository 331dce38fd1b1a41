"""What became of requests: one record each, kept as lines of JSON, many runs to a file.

A file holds runs one after the other: a line that says what a run was, then a line
for each request and a line for each sample of the server's state. All times of a
run are seconds on one clock whose 0 is the run's start, so the intended start of a
request is its ``arrival_s``.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from workloads.arrivals import Arrival
from workloads.errors import InvalidWorkload


@dataclass(slots=True)
class RequestRecord:
    """What became of one request. Times in seconds from the start of the run.

    Attributes:
        request: what was asked for; its ``arrival_s`` is the intended start, from
            which every latency is measured, whenever it was really sent.
        sent_s: when it was handed to the transport; None: never.
        accepted_s: when the server said it had queued it.
        num_output_tokens: tokens it got.
        first_token_s: when it got the first; None: never.
        last_token_s: when it got the last so far.
        longest_stall_s: longest time between two of its tokens.
        token_times_s: one for each token, where they were kept; tokens that came
            together have the same.
        ended_s: when its end was known.
        reason: why it ended with an output, such as ``length``; None while it has not.
        error: name of the error it was refused or failed with, such as ``QUEUE_FULL``.
        error_message: its text.
        num_preemptions: times it lost its place.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_recomputed_tokens: tokens computed again after preemptions.
        queued_s: waiting before its first admission; None: not known.
        preempted_s: waiting after preemptions; None: not known.
    """

    request: Arrival
    sent_s: float | None = None
    accepted_s: float | None = None
    num_output_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    longest_stall_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    reason: str | None = None
    error: str | None = None
    error_message: str = ""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    queued_s: float | None = None
    preempted_s: float | None = None

    def got_tokens(self, num_tokens: int, now_s: float) -> None:
        """Book tokens that came together; times must not go back."""
        if num_tokens == 0:
            return
        self.num_output_tokens += num_tokens
        if self.last_token_s is None:
            self.first_token_s = now_s
        elif now_s - self.last_token_s > self.longest_stall_s:
            self.longest_stall_s = now_s - self.last_token_s
        self.last_token_s = now_s


@dataclass(frozen=True, slots=True)
class Sample:
    """The server's state at one moment.

    Attributes:
        time_s: when, from the start of the run.
        num_running: requests with a seat.
        num_waiting: requests without one.
        kv_use: share of the KV blocks that is held, 0 to 1.
        num_preemptions: so far, in all.
        num_recomputed_tokens: so far, in all; None: not known.
        waiting_by_class: of those without a seat, by class.
    """

    time_s: float
    num_running: int
    num_waiting: int
    kv_use: float
    num_preemptions: int = 0
    num_recomputed_tokens: int | None = None
    waiting_by_class: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """One workload at one rate against one configuration, and what came of it.

    Attributes:
        name: the configuration that was tried, such as a policy.
        workload: name of the workload.
        offered_rps: mean arrivals a second that were meant; None: not stated.
        seed: of the workload.
        end_s: when the last thing happened.
        server: what served: hardware profile, or model and version.
        command: that made it, exactly.
        versions: of whatever took part, by name.
        figures: anything else that was counted, by name, such as ``num_steps``.
        records: by order of arrival.
        samples: by time.
    """

    name: str
    workload: str = ""
    offered_rps: float | None = None
    seed: int = 0
    end_s: float = 0.0
    server: str = ""
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def write_runs(path: Path, runs: Iterable[Run]) -> None:
    """Write runs as lines of JSON; a file of that name is replaced.

    Raises:
        OSError: it can't be written.
    """
    with path.open("w", encoding="utf-8") as file:
        for run in runs:
            file.writelines(f"{line}\n" for line in lines_of(run))


def lines_of(run: Run) -> Iterator[str]:
    """A run as lines: itself, its requests, its samples."""
    head = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in ("records", "samples")}
    yield _line("run", head)
    for record in run.records:
        yield _line("request", asdict(record))
    for sample in run.samples:
        yield _line("sample", asdict(sample))


def read_runs(path: Path) -> list[Run]:
    """Read what ``write_runs`` wrote. Fields that this version doesn't know are passed over.

    Raises:
        InvalidWorkload: a line is not what it should be; the message names it.
        OSError: it can't be read.
    """
    runs: list[Run] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                body = json.loads(line)
                kind = body.pop("kind")
                if kind == "run":
                    runs.append(_made(Run, body))
                elif kind == "request":
                    request = body.pop("request")
                    request["hash_ids"] = tuple(request.get("hash_ids", ()))
                    runs[-1].records.append(_made(RequestRecord, body | {"request": _made(Arrival, request)}))
                elif kind == "sample":
                    runs[-1].samples.append(_made(Sample, body))
                else:
                    raise ValueError(kind)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                rule = f"must be a run, or a request or sample after one ({type(error).__name__}: {error})"
                raise InvalidWorkload(f"{path.name} line {number}", rule, line.strip()) from error
    return runs


def _line(kind: str, body: dict[str, Any]) -> str:
    return json.dumps({"kind": kind} | body, allow_nan=False)


def _made(kind: type[Any], body: dict[str, Any]) -> Any:
    known = {f.name for f in fields(kind)}
    return kind(**{name: value for name, value in body.items() if name in known})
