"""Reads traces of real traffic: files of arrivals and lengths, gzipped or not.

| format | file | columns |
|---|---|---|
| ``azure`` | Azure LLM inference traces 2023/2024, csv | TIMESTAMP, ContextTokens, GeneratedTokens |
| ``mooncake`` | Mooncake, jsonl | timestamp (ms), input_length, output_length, hash_ids |
| ``vtc`` | csv with clients | arrival_s, client, prompt_tokens, output_tokens |
| ``measured`` | a measured run of vLLM, jsonl | see ``MeasuredRequest`` |
"""

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

from workloads.arrivals import Arrival, Workload, in_order
from workloads.errors import InvalidWorkload

#: Arrivals that are all multiples of at least this many milliseconds have been rounded.
_ROUNDED_MS = 1000


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """One request of a measured vLLM run. All times in seconds.

    Attributes:
        arrival_s: the front end took it; the wall clock of the file, shifted onto the
            engine's monotonic clock (see ``read_measured``), from the first arrival.
        first_token_s: the engine had its first output token, from the first arrival.
        last_token_s: the engine had its last one.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float
    first_token_s: float
    last_token_s: float


def read_trace(path: Path, trace_format: str = "auto") -> Workload:
    """Read a trace.

    Args:
        path: the file; a name that ends in ``.gz`` is unpacked.
        trace_format: a name in ``FORMATS``, or ``auto``: told by the first line.

    Raises:
        InvalidWorkload: unknown format, or a line that is not of it.
        OSError: it can't be read.
    """
    if trace_format == "auto":
        trace_format = _format_of(path)
    if trace_format not in FORMATS:
        raise InvalidWorkload("format", f"must be auto or one of {', '.join(FORMATS)}", trace_format)
    with _open(path) as file:
        try:
            requests = FORMATS[trace_format](file)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidWorkload("workload", f"must be a {trace_format} trace: {error!r}", path) from error
    return in_order(path.name, requests)


def read_measured(path: Path) -> list[MeasuredRequest]:
    """Read a measured run, in order of arrival.

    The file has arrivals on the wall clock and all else on a monotonic one. An
    idle engine queues a request at once, so the smallest difference between
    ``queued_ts`` and ``arrival_time`` is taken as the distance of the clocks; a
    constant hand-over from front end to engine (well under a millisecond on the
    RTX PRO 6000 run) is thereby left out of every arrival.
    """
    with _open(path) as file:
        rows = [json.loads(line) for line in file]
    rows.sort(key=lambda row: row["arrival_time"])
    offset = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    start = rows[0]["arrival_time"] + offset
    return [
        MeasuredRequest(
            num_prompt_tokens=row["input_toks"],
            num_output_tokens=row["output_toks"],
            arrival_s=row["arrival_time"] + offset - start,
            first_token_s=row["first_token_ts"] - start,
            last_token_s=row["last_token_ts"] - start,
        )
        for row in rows
    ]


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def _format_of(path: Path) -> str:
    with _open(path) as file:
        first = file.readline()
    marks = {"ContextTokens": "azure", "hash_ids": "mooncake", "input_length": "mooncake", "client": "vtc"}
    marks["first_token_ts"] = "measured"
    for mark, name in marks.items():
        if mark in first:
            return name
    raise InvalidWorkload("workload", f"must be a trace in a known format ({', '.join(FORMATS)})", path)


def _request(arrival_s: float, num_prompt: Any, num_output: Any, **more: Any) -> Arrival:
    # A request without output is still a forward pass; its one token is the least the engine can make.
    return Arrival(0, arrival_s, int(num_prompt), max(1, int(num_output)), **more)


def _azure(file: IO[str]) -> list[Arrival]:
    return [
        _request(
            # Seven fractional digits in the file, six in Python.
            datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00").timestamp(),
            row["ContextTokens"],
            row["GeneratedTokens"],
        )
        for row in csv.DictReader(file)
    ]


def _mooncake(file: IO[str]) -> list[Arrival]:
    rows = [json.loads(line) for line in file if line.strip()]
    times_s = _spread([row["timestamp"] for row in rows])
    return [
        _request(time_s, row["input_length"], row["output_length"], hash_ids=tuple(row.get("hash_ids") or ()))
        for time_s, row in zip(times_s, rows, strict=True)
    ]


def _spread(times_ms: list[int]) -> list[float]:
    """Arrival times in seconds; those rounded to a coarse raster are spread over it, in file order."""
    raster_ms = math.gcd(*(int(time_ms) for time_ms in times_ms))
    if raster_ms < _ROUNDED_MS:
        return [time_ms / 1e3 for time_ms in times_ms]
    sizes: dict[int, int] = {}
    for time_ms in times_ms:
        sizes[time_ms] = sizes.get(time_ms, 0) + 1

    def spread() -> Iterator[float]:
        seen: dict[int, int] = {}
        for time_ms in times_ms:
            rank = seen.get(time_ms, 0)
            seen[time_ms] = rank + 1
            yield (time_ms + raster_ms * rank / sizes[time_ms]) / 1e3

    return list(spread())


def _vtc(file: IO[str]) -> list[Arrival]:
    return [
        _request(
            float(row["arrival_s"]),
            row["prompt_tokens"],
            row["output_tokens"],
            tenant=f"client-{row['client']}",
        )
        for row in csv.DictReader(file)
    ]


def _measured(file: IO[str]) -> list[Arrival]:
    rows = [json.loads(line) for line in file]
    return [_request(row["arrival_time"], row["input_toks"], row["output_toks"]) for row in rows]


FORMATS: dict[str, Callable[[IO[str]], list[Arrival]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "vtc": _vtc,
    "measured": _measured,
}
