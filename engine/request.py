"""A request: what was asked for (frozen) and how far it has come (owned by the scheduler)."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from engine.priority import DEFAULT_LEVEL, class_rank
from engine.sampling import SamplingParams

#: Made by the server, unique in the process; never the client's own id.
RequestId = NewType("RequestId", str)


class FinishReason(enum.Enum):
    """Why a request ended with an output."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    CAPACITY = "capacity"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"


class PreemptReason(enum.Enum):
    """Why a running request lost its seat and blocks."""

    SEATS = "seats"
    BLOCKS = "blocks"
    GROWTH = "growth"
    OPERATOR = "operator"
    RUNNER = "runner"


class RequestStatus(enum.Enum):
    """Where a request is.

    ```
    WAITING -> RUNNING <-> PREEMPTED      any of them <-> PARKED      any -> FINISHED
    ```
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    PARKED = "parked"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What was asked for.

    Attributes:
        request_id: made by the server, unique in the process.
        prompt_token_ids: at least one id.
        sampling: validated parameters, ``max_tokens`` and ``seed`` already resolved.
        level: effective priority.
        eos_token_ids: ids that end the output; empty under ``ignore_eos``.
        cache_salt: requests share prefixes only inside one salt (the tenant by default).
        tenant: who asks; quotas and fairness are by tenant.
        queue_deadline: time of the engine's clock at which it ends if it never got a seat.
        total_deadline: time of the engine's clock at which it ends whatever it has.
        label: free text for logs.
        adapter: name of the adapter it is computed with; empty = none.
        family: shared by the outputs of one prompt, the id of the first; empty for an only one.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    level: int = DEFAULT_LEVEL
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    tenant: str = ""
    queue_deadline: float | None = None
    total_deadline: float | None = None
    label: str = ""
    family: str = ""
    adapter: str = ""

    @property
    def prefix_salt(self) -> str:
        """Prefixes are shared only inside it: KV of one adapter is not that of another."""
        return f"{self.cache_salt}\0{self.adapter}" if self.adapter else self.cache_salt

    @property
    def shares_prompt(self) -> bool:
        """Whether its prompt is the account of another output."""
        return bool(self.family) and self.family != self.request_id


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request has cost. Durations in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    parked_s: float = 0.0


class Request:
    """State of one request; only the scheduler and the block manager write it.

    A request has ``num_computed_tokens`` chasing ``num_tokens`` (prompt +
    output); a fresh prompt, a chunk, a decode and a resume after preemption are
    all "compute the next n tokens".

    Attributes:
        token_ids: prompt + output, append-only; survives preemption.
        draft_token_ids: guesses of its next tokens, from a plan to its commit.
        block_hashes: chain of prefix hashes of the full blocks of ``token_ids``,
            extended on demand by the block manager; survives preemption.
        block_table: blocks it holds, in order; a new list whenever it gets or loses them.
        num_confirmed_blocks: how many of them can be found by others.
        arrival_seq: order of arrival; kept across preemptions (seniority).
        num_computed_tokens: tokens whose KV is in the pool, or will be after the step in flight.
        num_tokens_in_flight: how many of these that step computes; counted only once the next one is planned.
        num_outputs_in_flight: 1 while that step samples a token of it, counted likewise; else 0.
        num_preemptions: times it was made to give way; too many, and it is admitted for good.
        num_drafted_tokens: guesses that were computed; of these, ``num_accepted_tokens`` were right.
        num_kv_losses: times it lost its blocks with the whole pool, which is nobody's claim on it.
        num_lost_tokens: computed tokens lost by the last preemption, until it resumes.
        num_bypassed: admissions of others that passed it while it did not fit.
        num_outputs_at_resume: output tokens it had when it last resumed; None before the first time.
        num_outputs_allowed: length its output may have for now; None = any.
        idle_since: time it last arrived or was granted a token.
        is_starved: it waited longer than its class may; served by the reserved share, until its end.
        holds_all: admitted with blocks for its longest length; it is never evicted.
        in_reserve: admitted to the share of the starved.
        has_started: it had a seat before.
        awaits_mask: what its grammar lets come next is not known yet, so it is granted no token to sample.
        mask_index: longest output for which that is known, as far as anybody has told; -1 = none.
        seat_level: its level when it last got one.
        was_parked: it had a seat and was parked since.
        ending_token_ids: ids that end its output, once it has ``min_tokens``.
        max_known_tokens: prompt + output at its longest.
        num_tokens_max: tokens at which it ends whatever it says; set by the scheduler.
        num_scored_tokens: tokens of the prompt whose computation has told how likely the next one was; only
            for who asked for it, None = nobody did.
    """

    __slots__ = (
        "__weakref__", "_phase_since", "adapter", "arrival_seq", "awaits_mask", "block_hashes", "block_table",
        "cache_rank", "cache_salt", "draft_token_ids", "ending_token_ids", "has_started",
        "holds_all", "idle_since", "in_reserve", "is_starved", "level", "mask_index", "max_known_tokens",
        "num_accepted_tokens", "num_bypassed", "num_cached_tokens", "num_computed_tokens",
        "num_confirmed_blocks", "num_drafted_tokens", "num_kv_losses", "num_lost_tokens",
        "num_outputs_allowed", "num_outputs_at_resume", "num_outputs_in_flight", "num_preemptions",
        "num_prompt_tokens", "num_recomputed_tokens", "num_scored_tokens", "num_tokens_in_flight",
        "num_tokens_max", "phase_s", "preempted_in_step", "request_id", "seat_level", "spec",
        "status", "token_ids", "was_parked",
    )  # fmt: skip

    def __init__(self, spec: RequestSpec, arrival_seq: int, now: float) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.cache_salt = spec.prefix_salt
        self.adapter = spec.adapter
        self.level = spec.level
        self.arrival_seq = arrival_seq
        self.status = RequestStatus.WAITING
        self.token_ids: list[int] = list(spec.prompt_token_ids)
        self.draft_token_ids: Sequence[int] = ()
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.block_hashes: list[bytes] = []
        self.block_table: list[int] = []
        self.num_confirmed_blocks = 0
        self.ending_token_ids = spec.eos_token_ids.union(spec.sampling.stop_token_ids)
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.max_known_tokens = self.num_prompt_tokens + spec.sampling.max_tokens
        self.num_tokens_max = self.max_known_tokens
        self.num_computed_tokens = 0
        self.num_tokens_in_flight = 0
        self.num_outputs_in_flight = 0
        self.num_cached_tokens = 0
        self.num_lost_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_scored_tokens = None if spec.sampling.prompt_logprobs is None else 0
        self.num_preemptions = 0
        self.num_kv_losses = 0
        self.preempted_in_step = 0
        self.num_bypassed = 0
        self.num_outputs_at_resume: int | None = None
        self.num_outputs_allowed: int | None = None
        self.idle_since = now
        self.is_starved = False
        self.holds_all = False
        self.in_reserve = False
        self.has_started = False
        self.awaits_mask = False
        self.mask_index = -1
        self.seat_level = spec.level
        self.was_parked = False
        self.cache_rank = class_rank(spec.level)
        self.phase_s = {"queued": 0.0, "prefill": 0.0, "decode": 0.0, "preempted": 0.0, "parked": 0.0}
        self._phase_since = now

    @property
    def num_tokens(self) -> int:
        """Prompt + output tokens so far, one in flight included."""
        return len(self.token_ids) + self.num_outputs_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens not yet computed; 1 while decoding."""
        return len(self.token_ids) + self.num_outputs_in_flight - self.num_computed_tokens

    @property
    def num_committed_tokens(self) -> int:
        """Tokens whose KV is certainly in the pool: no step in flight need succeed for it."""
        return self.num_computed_tokens - self.num_tokens_in_flight

    @property
    def is_ending(self) -> bool:
        """Whether the token in flight is its last one, whatever it is; then nothing is left to compute."""
        return self.num_outputs_in_flight > 0 and len(self.token_ids) + 1 >= self.num_tokens_max

    @property
    def num_cacheable_tokens(self) -> int:
        """Tokens whose KV may come from the cache: what is found there is not computed, so scores nothing."""
        num_scored = self.num_scored_tokens
        return len(self.token_ids) if num_scored is None or self.is_scored else num_scored

    @property
    def is_scored(self) -> bool:
        """Whether nothing of its prompt is still to be scored; the last token of a prompt scores no other."""
        return self.num_scored_tokens is None or self.num_scored_tokens >= self.num_prompt_tokens - 1

    @property
    def num_tokens_to_score(self) -> int:
        """Tokens to compute that will tell how likely the next one was; a prompt's last tells nothing."""
        if self.num_scored_tokens is None:
            return 0
        return max(0, self.num_prompt_tokens - 1 - self.num_computed_tokens)

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens are still to be computed; a decode misses its last output token alone."""
        num_tokens = len(self.token_ids) + self.num_outputs_in_flight
        return num_tokens - self.num_computed_tokens > 1 or num_tokens == self.num_prompt_tokens

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self.spec.sampling

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def phase(self) -> str:
        """What its time is spent on now: ``queued``, ``prefill``, ``decode``, ``preempted`` or ``parked``."""
        if self.status is RequestStatus.WAITING:
            return "queued"
        if self.status is RequestStatus.PREEMPTED:
            return "preempted"
        if self.status is RequestStatus.PARKED:
            return "parked"
        return "prefill" if self.num_output_tokens == 0 else "decode"

    @property
    def phase_since(self) -> float:
        """Up to when its time is booked."""
        return self._phase_since

    def spend(self, now: float) -> None:
        """Book the time since the last call on the phase the request is in; call before it changes."""
        self.phase_s[self.phase] += now - self._phase_since
        self._phase_since = now

    def usage(self) -> Usage:
        """What it has cost up to the last ``spend``."""
        phase_s = self.phase_s
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            output_tokens=self.num_output_tokens,
            recomputed_tokens=self.num_recomputed_tokens,
            preemptions=self.num_preemptions + self.num_kv_losses,
            drafted_tokens=self.num_drafted_tokens,
            accepted_tokens=self.num_accepted_tokens,
            queued_s=phase_s["queued"],
            prefill_s=phase_s["prefill"],
            decode_s=phase_s["decode"],
            preempted_s=phase_s["preempted"],
            parked_s=phase_s["parked"],
        )
