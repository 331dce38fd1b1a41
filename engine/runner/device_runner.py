"""A model on a device, or on several: a plan in, one transfer each way, sampled tokens out.

Beside ``torch_runner``, which is for a CPU alone. Launching a step and waiting
for its result are two calls, so that the host can be ahead of the device by one.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.errors import VorrangError
from engine.request import RequestId
from engine.runner import logprobs
from engine.runner.base import ModelBroken, ModelInfo, PoolShape
from engine.runner.batch import Batch, build_batch, with_masks
from engine.runner.executor import StepExecutor
from engine.runner.grammars import constraint
from engine.runner.grammars.masks import Masks
from engine.runner.logprobs import wanted_rows
from engine.runner.packing import StepShape, bucket_for, num_words, pack, padded, shape_of
from engine.runner.step_report import Report
from engine.runner.torch_runner import fail_alone, warm_up_plan
from engine.scheduler.plan import Plan, StepResult
from kernels import ops
from kernels.ops import SamplingInputs


class OtherRanks(Protocol):
    """The ranks that compute every step with this one."""

    def announce(self, shape: StepShape, words: Tensor) -> None:
        """Tell them of a step, before this one computes it.

        Raises:
            OSError: one is gone.
        """
        ...

    def explain(self, error: Exception) -> ModelBroken:
        """Why a step failed that they were told of."""
        ...


#: Steps whose inputs may be under way to the device at one time.
NUM_IN_FLIGHT = 2


class DeviceModel:
    """A ``LaunchingModel`` on one device, or rank 0 of several.

    Args:
        info: what is served.
        executor: computes.
        buckets: sizes that decodes are padded to; empty = none are padded.
        others: the other ranks; None = there are none.
        masks: compiles and follows what outputs must match; None = nobody may ask for that.
    """

    def __init__(
        self,
        info: ModelInfo,
        executor: StepExecutor,
        *,
        buckets: Sequence[int] = (),
        others: OtherRanks | None = None,
        masks: Masks | None = None,
    ) -> None:
        self._info = info
        self._executor = executor
        self._buckets = buckets
        self._others = others
        self.masks = masks
        self._step_s = 0.0  # of the last one that was waited for
        on_device = executor.device.type != "cpu"
        self._inputs = [HostWords(pinned=on_device) for _ in range(NUM_IN_FLIGHT)]
        self._reports = [HostWords(pinned=on_device) for _ in range(NUM_IN_FLIGHT)]
        self._num_launched = 0
        self._last_rows: dict[RequestId, int] = {}
        self._last: Launched | None = None

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool, without the scratch block."""
        pool = self._executor.pool
        return PoolShape(pool.num_blocks - 1, pool.block_size)

    def warm_up(self) -> None:
        """Compute one token into block 0. Call before block 0 is given to anybody."""
        self.run(warm_up_plan())

    def run(self, plan: Plan) -> StepResult:
        """Compute every grant of ``plan``.

        A request fails alone, with ``InternalError``, when its hidden states or
        logits are not finite, or when it holds an id outside the vocabulary.

        Raises:
            ModelBroken: the device failed, or the other ranks are no longer in step with this one.
        """
        if not plan.grants:
            return StepResult({})
        return self.collect(self.launch(plan))

    def launch(self, plan: Plan) -> "Launched":
        """Have the device begin a plan, which has grants; ``collect`` must follow, in order.

        A grant may lack its last token if the plan launched before samples it: the
        device takes it from there, without the host's having seen it. If that one
        failed, it is any id. Where a request can't choose without knowing it (penalties,
        banned sequences, a grammar), this waits for that plan first, and the device for this one.

        Invariant: at most ``NUM_IN_FLIGHT`` are launched and not collected.

        Raises:
            ModelBroken: see ``run``.
        """
        failures: dict[RequestId, VorrangError] = {}
        began = time.perf_counter()
        batch = build_batch(plan, self._executor.pool.block_size, self._last_tokens, self.masks)
        failures.update(batch.dead_ends)
        strange = _mask_strange_ids(batch, self._info.vocab_size)
        fail_alone(plan, strange, "ids are unknown", failures)
        for place, request_id in batch.unknown:
            batch.token_ids[place] = -1 - self._last_rows.get(request_id, 0)
        self._last_rows = {request_id: row for row, request_id in enumerate(batch.sampling_ids)}
        own_sampling = batch.sampling
        size = bucket_for(batch, self._buckets)
        if size is not None:
            batch = padded(batch, size, self._executor.scratch_block, self._executor.pool.block_size)
        shape = shape_of(batch)
        turn = self._num_launched % NUM_IN_FLIGHT
        self._num_launched += 1
        words = self._inputs[turn].take(num_words(shape))
        pack(batch, words)
        try:
            if self._others is not None:
                self._others.announce(shape, words)
            report, found = self._compute(shape, words, batch, own_sampling, self._reports[turn])
        except Exception as error:
            raise self._as_broken(error) from error
        event: torch.cuda.Event | None = None
        if report.is_pinned():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        if found is not None:
            failures.update(found.failures)
        self._last = Launched(plan, batch, failures, report, event, found, began)
        return self._last

    def _last_tokens(self) -> dict[RequestId, int]:
        """What the plan launched last samples; waits for it.

        Raises:
            ModelBroken: see ``run``.
        """
        if self._last is None:
            return {}
        self._wait_for(self._last)
        sampling_ids = self._last.batch.sampling_ids
        token_ids = self._last.report[: len(sampling_ids)].tolist()
        said = dict(zip(sampling_ids, token_ids, strict=True))
        for request_id in self._last.silent:
            said.pop(request_id, None)
        return said

    def _wait_for(self, launched: "Launched") -> None:
        try:
            if launched.event is not None:
                launched.event.synchronize()
        except Exception as error:
            raise self._as_broken(error) from error

    def collect(self, launched: "Launched") -> StepResult:
        """Wait for the oldest launched plan, and say what came of it.

        Raises:
            ModelBroken: see ``run``.
        """
        self._wait_for(launched)
        plan, batch, failures = launched.plan, launched.batch, launched.failures
        report = Report(batch, launched.report)
        broken = zip(batch.request_ids, report.broken(), strict=False)  # padding follows
        fail_alone(plan, [i for i, count in broken if count], "hidden states are not finite", failures)
        token_ids = report.token_ids()
        bad_rows = zip(batch.sampling_ids, report.failed(), strict=True)
        hopeless = [i for i, bad in bad_rows if bad and i not in launched.silent]
        fail_alone(plan, hopeless, "no finite logits", failures)
        scores = report.prompt_logprobs()
        self._step_s = time.perf_counter() - launched.began
        logprobs_by_id = report.logprobs(token_ids)
        return batch.result(token_ids, failures, logprobs_by_id, scores, launched.found, self.masks)

    def _compute(
        self, shape: StepShape, words: Tensor, batch: Batch, own: SamplingInputs, buffer: "HostWords"
    ) -> tuple[Tensor, constraint.Found | None]:
        """Compute and sample; a ``Report`` on the host, once the device is there.

        ``own`` is how the batch's own rows sample, before any were added. What grammars allow is
        waited for when the device has begun.

        Returns:
            The report, and what was known of rows under grammars.
        """
        num_sampling, found_masks = len(batch.sampling_ids), None
        inputs, outputs = self._executor.compute(shape, words)
        parts = [outputs.broken]
        if batch.constrained:
            assert self.masks is not None
            patience_s = constraint.wait_s(self._step_s)
            vocab_size = self._info.vocab_size
            found_masks = constraint.find(batch.constrained, self.masks, patience_s, vocab_size)
            own = with_masks(own, found_masks)
        with torch.inference_mode():
            if outputs.logits is not None:
                logits = outputs.logits[:num_sampling]
                wanted, num_top = wanted_rows(batch)
                rows = moved(torch.tensor(wanted, dtype=torch.int64), logits.device)
                kept = logits.index_select(0, rows) if wanted else None  # sampling overwrites them
                chosen = ops.sample(logits, with_rest(first_rows(inputs.sampling, num_sampling), own))
                self._executor.last_ids[:num_sampling].copy_(chosen.token_ids)
                parts = [chosen.token_ids, chosen.failed.to(torch.int64), *parts]
                if kept is not None:
                    found = ops.log_probs(kept, chosen.token_ids.index_select(0, rows), num_top)
                    parts.append(logprobs.to_words(found))
            if outputs.scores is not None:
                parts.append(logprobs.to_words(outputs.scores))
            on_device = torch.cat(parts)
            on_host = buffer.take(on_device.shape[0])
            on_host.copy_(on_device, non_blocking=True)
        return on_host, found_masks

    def _as_broken(self, error: Exception) -> Exception:
        """``ModelBroken`` for what can't be survived, else the error itself."""
        if self._others is not None:
            return self._others.explain(error)
        if isinstance(error, torch.AcceleratorError):
            return ModelBroken(f"the device failed: {error}")
        return error


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A plan that the device computes.

    Attributes:
        plan: what.
        batch: its tensors, padded.
        failures: requests that failed before anything was computed.
        report: see ``DeviceModel``; on the host, without meaning before ``event``.
        event: when it has been computed; None = it has.
        found: what was known of rows under grammars; None = there are none.
        began: when it was launched, in seconds.
    """

    plan: Plan
    batch: Batch
    failures: dict[RequestId, VorrangError]
    report: Tensor
    event: torch.cuda.Event | None
    found: constraint.Found | None = None
    began: float = 0.0

    @property
    def silent(self) -> set[RequestId]:
        """Requests for which nothing that is sampled counts."""
        return set(self.batch.void) | (self.found.silent if self.found is not None else set())

    @property
    def is_computed(self) -> bool:
        """Whether ``collect`` has nothing to wait for; it has not when the device failed, either."""
        try:
            return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]
        except torch.AcceleratorError:
            return True


class HostWords:
    """A buffer on the host that stays where it is unless it must grow.

    Args:
        pinned: whether a device is to read or write it without the processor.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._words = torch.empty(0, dtype=torch.int64)

    def take(self, count: int) -> Tensor:
        """``[count]`` int64; its content is that of an earlier call, or nothing."""
        if self._words.shape[0] < count:
            self._words = torch.empty(_power_of_two(count), dtype=torch.int64, pin_memory=self._pinned)
        return self._words[:count]


def first_rows(sampling: SamplingInputs, count: int) -> SamplingInputs:
    """The first ``count`` rows; banned pairs are for them already."""
    return dataclasses.replace(
        sampling,
        temperature=sampling.temperature[:count],
        top_k=sampling.top_k[:count],
        top_p=sampling.top_p[:count],
        min_p=sampling.min_p[:count],
        seed=sampling.seed[:count],
        output_index=sampling.output_index[:count],
    )


def with_rest(packed: SamplingInputs, own: SamplingInputs) -> SamplingInputs:
    """``packed``, on a device, with what of ``own``, on the CPU, is not packed. Waits for nothing."""
    device = packed.temperature.device
    if own.adjustments is None and own.allowed is None and own.typical_p is None and own.mask is None:
        return packed

    def all_moved(part: Any) -> Any:
        if part is None:
            return None
        columns = {each.name: moved(getattr(part, each.name), device) for each in dataclasses.fields(part)}
        return type(part)(**columns)

    return dataclasses.replace(
        packed,
        adjustments=all_moved(own.adjustments),
        allowed=all_moved(own.allowed),
        typical_p=None if own.typical_p is None else moved(own.typical_p, device),
        mask=all_moved(own.mask),
    )


def moved(values: Tensor, device: torch.device) -> Tensor:
    """On the device, which reads them from pinned memory when it comes to it."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def _power_of_two(count: int) -> int:
    return 1 << max(10, (count - 1).bit_length())


def _mask_strange_ids(batch: Batch, vocab_size: int) -> list[RequestId]:
    """Put id 0 in the place of ids outside the vocabulary; whose they were."""
    strange = (batch.token_ids < 0) | (batch.token_ids >= vocab_size)
    if not bool(strange.any()):
        return []
    batch.token_ids.masked_fill_(strange, 0)
    rows = torch.searchsorted(batch.attention.query_start, strange.nonzero().flatten(), right=True) - 1
    return [batch.request_ids[row] for row in sorted(set(rows.tolist()))]
