"""Workload files: TOML that says what arrives. docs/REPORTS.md describes the format.

A file has a ``name``, a ``duration_s`` and streams (``[[stream]]``), each of one kind of
requests: made up from distributions, or replayed from a trace. The same seed
makes the same workload, and each stream draws from a source of its own, so
that changing one leaves the others as they were.
"""

import dataclasses
import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.arrivals import Arrival, Workload, in_order
from workloads.classes import LEVEL_MAX, LEVEL_MIN, level_named
from workloads.distributions import MAX_TOKENS, Arrivals, Length, read_arrivals, read_length
from workloads.errors import InvalidWorkload
from workloads.tables import Table
from workloads.traces import FORMATS, read_trace

#: Requests of one workload at most.
MAX_REQUESTS = 1_000_000
#: Tokens of a block of a shared prefix: the smallest that servers share.
PREFIX_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Conversation:
    """How a stream's conversations go on: a turn's prompt begins with the one before and its output.

    Attributes:
        turns: how many requests a conversation has.
        think_s: mean time from the arrival of one turn to that of the next, exponential.
    """

    turns: Length
    think_s: float


@dataclass(frozen=True, slots=True)
class Stream:
    """One kind of requests.

    Attributes:
        label: its name in reports.
        level: of urgency.
        start_s: arrivals begin then.
        end_s: and end before then.
        arrivals: when requests, or conversations, begin.
        prompt_tokens: length of a prompt, or of what a turn adds; the shared prefix is not counted.
        output_tokens: length of an output.
        tenants: drawn from, all equally likely.
        prefix_tokens: tokens that the prompts of one group begin with.
        prefix_groups: groups, drawn from, all equally likely.
        conversation: how it goes on.
    """

    label: str
    level: int
    start_s: float
    end_s: float
    arrivals: Arrivals
    prompt_tokens: Length
    output_tokens: Length
    tenants: tuple[str, ...] = ("",)
    prefix_tokens: int = 0
    prefix_groups: int = 1
    conversation: Conversation | None = None


def read_workload(path: Path, seed: int = 0, duration_s: float | None = None) -> Workload:
    """Read a workload file.

    Args:
        path: the file.
        seed: of whatever is drawn.
        duration_s: instead of the file's own.

    Raises:
        InvalidWorkload: it is no TOML, or breaks a rule; names field, rule and value.
        OSError: it, or a trace it names, can't be read.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidWorkload(str(path), f"must be TOML ({error})", path.name) from None
    return parse_workload(values, seed=seed, folder=path.parent, duration_s=duration_s)


def parse_workload(
    values: dict[str, Any], *, seed: int = 0, folder: Path = Path(), duration_s: float | None = None
) -> Workload:
    """As ``read_workload``, of a file's content; ``folder`` is where traces are looked for."""
    file = Table(values)
    name = file.text("name")
    file.text("description", "")
    own_duration_s = file.number("duration_s", above=0)
    duration_s = own_duration_s if duration_s is None else duration_s
    if not duration_s > 0:
        raise InvalidWorkload("duration_s", "must be greater than 0", duration_s)
    streams = file.take("stream")
    file.end()
    if not isinstance(streams, list) or not streams:
        raise InvalidWorkload("stream", "must be one or more tables [[stream]]", streams)
    ids = _Ids()
    requests: list[Arrival] = []
    for number, stream in enumerate(streams):
        table = Table(stream, f"stream[{number}]")
        rng = random.Random(f"{seed}/{number}")
        read = _replayed if "trace" in table else _made_up
        for request in read(table, rng, duration_s, folder, ids, number):
            requests.append(request)
            if len(requests) > MAX_REQUESTS:
                raise InvalidWorkload("stream", f"must hold at most {MAX_REQUESTS:,} requests in all", name)
    return in_order(f"{name} (seed {seed})", requests, shift=False)


class _Ids:
    """Numbers for things that must be told apart, in the order in which they are met."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, ...], int] = {}

    def of(self, *key: int) -> int:
        return self._ids.setdefault(key, len(self._ids))


def _read_stream(table: Table, duration_s: float) -> Stream:
    label = table.text("label", "")
    level = _level(table)
    start_s = table.number("start_s", 0.0, least=0)
    end_s = min(duration_s, table.number("end_s", duration_s, above=start_s))
    stream = Stream(
        label, level, start_s, end_s,
        read_arrivals(table), read_length(table, "prompt_tokens"), read_length(table, "output_tokens"),
        _tenants(table),
    )  # fmt: skip
    if "prefix" in table:
        prefix = table.table("prefix")
        tokens, groups = prefix.whole("tokens", most=MAX_TOKENS), prefix.whole("groups", 1)
        prefix.end()
        stream = dataclasses.replace(stream, prefix_tokens=tokens, prefix_groups=groups)
    if "conversation" in table:
        inner = table.table("conversation")
        conversation = Conversation(read_length(inner, "turns"), inner.number("think_s", above=0))
        inner.end()
        stream = dataclasses.replace(stream, conversation=conversation)
    table.end()
    return stream


def _level(table: Table) -> int:
    if "level" in table:
        if "class" in table:
            raise InvalidWorkload(table.field("level"), "must not stand beside class", table.take("level"))
        return table.whole("level", least=LEVEL_MIN, most=LEVEL_MAX)
    return level_named(table.text("class", "standard"), field=table.field("class"))


def _tenants(table: Table) -> tuple[str, ...]:
    value = table.take("tenants", [""])
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise InvalidWorkload(table.field("tenants"), "must be a list of names", value)
    return tuple(value)


def _made_up(
    table: Table, rng: random.Random, duration_s: float, folder: Path, ids: _Ids, number: int
) -> Iterator[Arrival]:
    stream = _read_stream(table, duration_s)
    for begin, time_s in enumerate(stream.arrivals(rng, stream.start_s, stream.end_s)):
        tenant, group = rng.choice(stream.tenants), rng.randrange(stream.prefix_groups)

        def block(
            position: int, group: int = group, conversation: int = begin
        ) -> int:  # a block of the prefix, or of the conversation's own history
            in_prefix = position < stream.prefix_tokens // PREFIX_BLOCK_TOKENS
            return (
                ids.of(number, 0, group, position) if in_prefix else ids.of(number, 1, conversation, position)
            )

        yield from _turns(stream, rng, time_s, tenant, block)


def _turns(
    stream: Stream, rng: random.Random, time_s: float, tenant: str, block: Callable[[int], int]
) -> Iterator[Arrival]:
    """The requests of one conversation, or the one that stands alone."""
    known_tokens = stream.prefix_tokens
    num_turns = 1 if stream.conversation is None else stream.conversation.turns(rng)
    for _ in range(num_turns):
        num_prompt = min(MAX_TOKENS, known_tokens + stream.prompt_tokens(rng))
        num_output = stream.output_tokens(rng)
        shared = num_prompt if stream.conversation is not None else stream.prefix_tokens
        hash_ids = tuple(block(position) for position in range(shared // PREFIX_BLOCK_TOKENS))
        yield Arrival(
            0,
            time_s,
            num_prompt,
            num_output,
            stream.level,
            tenant,
            hash_ids,
            PREFIX_BLOCK_TOKENS,
            stream.label,
        )
        if stream.conversation is None:
            return
        known_tokens = num_prompt + num_output
        time_s += rng.expovariate(1 / stream.conversation.think_s)
        if time_s >= stream.end_s:
            return


def _replayed(
    table: Table, rng: random.Random, duration_s: float, folder: Path, ids: _Ids, number: int
) -> Iterator[Arrival]:
    """A trace, cut to the duration; classes are drawn for its requests, tenants too unless it has its own."""
    name = table.text("trace")
    trace_format = table.text("format", "auto", one_of=("auto", *FORMATS))
    label = table.text("label", "")
    scale = table.number("scale", 1.0, above=0)
    start_s = table.number("start_s", 0.0, least=0)
    max_prompt_tokens = table.whole("max_prompt_tokens", MAX_TOKENS)
    tenants = _tenants(table) if "tenants" in table else None
    shares = table.take("classes")
    level = None if isinstance(shares, dict) else _level(table)
    table.end()
    workload = read_trace(folder / name, trace_format).with_prompts_up_to(max_prompt_tokens).scaled(scale)
    if shares is not None:
        if not isinstance(shares, dict):
            raise InvalidWorkload(table.field("classes"), "must be a table of shares", shares)
        workload = workload.with_classes(shares, rng.randrange(2**31))
    offsets: dict[int, int] = {}
    for request in workload.requests:
        if start_s + request.arrival_s >= duration_s:
            return
        for hash_id in request.hash_ids:
            offsets.setdefault(hash_id, ids.of(number, 2, hash_id))
        yield dataclasses.replace(
            request,
            arrival_s=start_s + request.arrival_s,
            level=request.level if level is None else level,
            tenant=request.tenant if tenants is None else rng.choice(tenants),
            hash_ids=tuple(map(offsets.__getitem__, request.hash_ids)),
            label=label,
        )
