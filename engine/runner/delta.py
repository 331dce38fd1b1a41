"""Plans as differences, for a runner that sees them from another process.

A decode needs a few numbers: what the far end knows of a request (parameters,
token ids, block table) is told once, then only what was added. ``PlanEncoder`` and
``PlanDecoder`` are the two ends; both are pure. What an encoder knows of its
decoder is lost when the far end dies: take a fresh one.

A token that is still being sampled by the plan before (``Grant.has_unknown_token``) is
not told: the decoder is told of samples where they are made, and appends its own. When
that plan failed, the decoder has a token that never was; the encoder sees that its
request went back, and introduces it anew.

Border: tokens of a request are only ever appended; a block table grows at its end
or is another list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from engine.request import RequestId
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan, StepResult

#: Plans after which requests that were not granted anything meanwhile are forgotten.
SWEEP_PLANS = 64

#: Stands in for a token that was never sampled, because its step or its row failed. Any id will do.
ANY_TOKEN_ID = 0

#: key, id, parameters, ending ids, tokens of the prompt, adapter
Introduction = tuple[int, RequestId, SamplingParams, frozenset[int], int, str]
#: key, start, num_tokens, output_index, tokens to append, blocks that stay, blocks that follow them, drafts
Row = tuple[int, int, int, int | None, Sequence[int], int, Sequence[int], Sequence[int]]
#: step, keys to forget, introductions, rows in the order of the grants
PlanDelta = tuple[int, Sequence[int], Sequence[Introduction], Sequence[Row]]

_NOTHING: tuple[int, ...] = ()


class _Told:
    """What the decoder knows of a request."""

    __slots__ = ("__weakref__", "block_table", "key", "num_blocks", "num_tokens", "plan")

    def __init__(self, key: int) -> None:
        self.key = key
        self.num_tokens = 0
        self.block_table: Sequence[int] = ()
        self.num_blocks = 0
        self.plan = 0


class PlanEncoder:
    """The near end."""

    def __init__(self) -> None:
        self._told: dict[RequestId, _Told] = {}
        self._num_keys = 0
        self._num_plans = 0

    def encode(self, plan: Plan) -> PlanDelta:
        """What the decoder lacks to make the plan; every delta must reach it, in order."""
        self._num_plans += 1
        gone: Sequence[int] = self._sweep() if self._num_plans % SWEEP_PLANS == 0 else ()
        introductions: list[Introduction] = []
        rows: list[Row] = []
        for request, start, num_tokens, table, output_index in plan.grants:
            told = self._told.get(request.request_id)
            token_ids = request.token_ids
            if told is not None and told.num_tokens > len(token_ids):
                # The plan that was to sample its last token failed, and the decoder made one up.
                gone = [*gone, told.key]
                told = None
            if told is None:
                told = self._told[request.request_id] = _Told(self._num_keys)
                self._num_keys += 1
                introductions.append(
                    (
                        told.key,
                        request.request_id,
                        request.sampling,
                        request.ending_token_ids,
                        request.num_prompt_tokens,
                        request.adapter,
                    )
                )
            told.plan = self._num_plans
            new_tokens = token_ids[told.num_tokens :]
            drafts = request.draft_token_ids
            num_known, end = len(token_ids), start + num_tokens - len(drafts)
            told.num_tokens = num_known if num_known >= end else end  # the decoder adds what is unknown
            kept = told.num_blocks if table is told.block_table else 0
            new_blocks = table[kept:] if len(table) > kept else _NOTHING
            told.block_table, told.num_blocks = table, len(table)
            rows.append((told.key, start, num_tokens, output_index, new_tokens, kept, new_blocks, drafts))
        return plan.step, gone, introductions, rows

    def _sweep(self) -> list[int]:
        """Forget whoever was not granted anything since the last sweep."""
        gone = [i for i, told in self._told.items() if told.plan <= self._num_plans - SWEEP_PLANS]
        return [self._told.pop(request_id).key for request_id in gone]


class KnownRequest:
    """A request as the far end knows it: a ``Granted``."""

    __slots__ = (
        "__weakref__", "adapter", "block_table", "draft_token_ids", "ending_token_ids",
        "num_prompt_tokens", "request_id", "sampling", "token_ids",
    )  # fmt: skip

    #: The far end keeps no record of levels.
    level = 0

    def __init__(
        self,
        request_id: RequestId,
        sampling: SamplingParams,
        ending_token_ids: frozenset[int],
        num_prompt_tokens: int,
        adapter: str,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.ending_token_ids = ending_token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.adapter = adapter
        self.token_ids: list[int] = []
        self.draft_token_ids: Sequence[int] = ()
        self.block_table: list[int] = []


class PlanDecoder:
    """The far end."""

    def __init__(self) -> None:
        self._known: dict[int, KnownRequest] = {}
        self._sampled: Mapping[RequestId, int] = {}
        self._is_ahead = False
        self._lacking: list[KnownRequest] = []  # their last token, which the plan before samples
        #: Requests whose last token in the plan just decoded never was: they sat out the plan before.
        self.void: frozenset[RequestId] = frozenset()

    @property
    def num_known(self) -> int:
        """Requests it remembers."""
        return len(self._known)

    def sampled(self, sampled: Mapping[RequestId, int]) -> None:
        """What the oldest plan has sampled of which this was not told; nothing, where it failed.

        Call it before a plan is decoded that is not ahead, and before the one after a plan that is.
        """
        if not self._is_ahead:
            self._sampled = sampled
            return
        for request in self._lacking:
            request.token_ids.append(sampled.get(request.request_id, ANY_TOKEN_ID))
        self._is_ahead = False
        self._lacking.clear()

    def decode(self, delta: PlanDelta, *, is_ahead: bool = False) -> Plan:
        """The plan, as far as a runner may look at it: step and grants.

        Args:
            delta: from the encoder.
            is_ahead: the plan before is still being computed, so a token that it samples is
                missing here, too (``Grant.has_unknown_token``), until ``sampled`` is called.
                Otherwise all tokens are known.
        """
        assert not self._is_ahead, "the plan before the last one has not been told of"
        before, self._sampled = self._sampled, {}
        self._is_ahead = is_ahead
        step, gone, introductions, rows = delta
        known = self._known
        for key in gone:
            del known[key]
        for key, request_id, sampling, ending_token_ids, num_prompt, adapter in introductions:
            known[key] = KnownRequest(request_id, sampling, ending_token_ids, num_prompt, adapter)
        grants: list[Grant] = []
        void: list[RequestId] = []
        for key, start, num_tokens, output_index, new_tokens, kept, new_blocks, drafts in rows:
            request = known[key]
            request.token_ids.extend(new_tokens)
            request.draft_token_ids = drafts
            if len(request.token_ids) >= start + num_tokens - len(drafts):
                pass
            elif is_ahead:
                self._lacking.append(request)
            else:
                if request.sampling.grammar is not None and request.request_id not in before:
                    void.append(request.request_id)
                request.token_ids.append(before.get(request.request_id, ANY_TOKEN_ID))
            if kept:
                request.block_table.extend(new_blocks)
            else:
                request.block_table = list(new_blocks)
            grants.append(Grant(request, start, num_tokens, request.block_table, output_index))
        self.void = frozenset(void)
        return Plan(step, tuple(grants))


def run_without(plan: Plan, void: frozenset[RequestId], run: Callable[[Plan], StepResult]) -> StepResult:
    """What comes of a plan some of whose grants are for tokens that never were: those sit it out."""
    if not void:
        return run(plan)
    left = without(plan, void)
    result = run(left) if left.grants else StepResult({})
    return replace(result, sat_out=result.sat_out | void)


def without(plan: Plan, void: frozenset[RequestId]) -> Plan:
    """A plan without some of its grants."""
    if not void:
        return plan
    return Plan(plan.step, tuple(grant for grant in plan.grants if grant.request_id not in void))
