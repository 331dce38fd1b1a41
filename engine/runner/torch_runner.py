"""The real model behind the runner's border: a plan in, sampled tokens out.

Decides nothing. Runs on the thread that calls it, one plan at a time.
"""

import secrets
import time
from collections.abc import Iterable

import structlog
import torch
from torch import Tensor

from engine.errors import InternalError, VorrangError
from engine.events import PositionLogProbs, PromptLogProbs
from engine.models.decoder import StepDecoder
from engine.request import Request, RequestId, RequestSpec
from engine.runner.base import ModelInfo, PoolShape
from engine.runner.batch import Batch, build_batch, with_masks
from engine.runner.cores import default_threads
from engine.runner.grammars import constraint
from engine.runner.grammars.masks import Masks
from engine.runner.logprobs import prompt_logprobs, sampled_logprobs, score, wanted_rows
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan, StepResult
from kernels import ops
from kv.pool import KvPool

log = structlog.get_logger(__name__)


def warm_up_plan() -> Plan:
    """One token into block 0, sampled greedily."""
    spec = RequestSpec(RequestId("warm-up"), (0,), SamplingParams(temperature=0.0))
    return Plan(step=0, grants=(Grant(Request(spec, 0, 0.0), 0, 1, [0], 0),))


class TorchModel:
    """A decoder with its KV pool, as a ``StepModel``.

    Args:
        info: what is served.
        decoder: the model.
        pool: its KV pool, on the decoder's device.
        num_threads: threads of one operation; None = as many as may run at once.
        masks: compiles and follows what outputs must match; None = nobody may ask for that.
    """

    def __init__(
        self,
        info: ModelInfo,
        decoder: StepDecoder,
        pool: KvPool,
        *,
        num_threads: int | None = None,
        masks: Masks | None = None,
    ) -> None:
        self._info = info
        self._decoder = decoder
        self._kv = pool
        self._num_threads = default_threads() if num_threads is None else num_threads
        self.masks = masks

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    @property
    def num_threads(self) -> int:
        """Threads of one operation."""
        return self._num_threads

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        return PoolShape(self._kv.num_blocks, self._kv.block_size)

    def warm_up(self) -> None:
        """Compute one token into block 0, so that the first request finds weights and code in memory.

        Call before block 0 is given to anybody.
        """
        self.run(warm_up_plan())

    def run(self, plan: Plan) -> StepResult:
        """Compute every grant of ``plan``.

        A request fails alone, with ``InternalError``, when its hidden states or
        logits are not finite, or when it holds an id outside the vocabulary.
        """
        if not plan.grants:
            return StepResult({})
        # Each time: torch keeps the number per calling thread, and another model may have set another.
        ops.set_num_threads(self._num_threads)
        batch = build_batch(plan, self._kv.block_size, masks=self.masks)
        with torch.inference_mode():
            return self._run(plan, batch)

    def _run(self, plan: Plan, batch: Batch) -> StepResult:
        vocab_size, began = self._info.vocab_size, time.perf_counter()
        strange = (batch.token_ids < 0) | (batch.token_ids >= vocab_size)
        token_ids = batch.token_ids.masked_fill(strange, 0)
        hidden = self._decoder.forward(
            token_ids, batch.attention, self._kv.keys, self._kv.values, batch.adapters
        )
        failures: dict[RequestId, VorrangError] = {}
        broken = strange | ~hidden.sum(dim=-1).isfinite()
        if bool(broken.any()):
            failed_ids = _owners(broken, batch)
            fail_alone(plan, failed_ids, "hidden states are not finite or ids are unknown", failures)
        failures.update(batch.dead_ends)
        prompts: dict[RequestId, PromptLogProbs] = {}
        if batch.scored:
            num_top = max(scored.num_top for scored in batch.scored)
            found = score(
                batch.score_rows,
                batch.score_ids,
                num_top,
                lambda rows: self._decoder.logits(hidden, rows),
            )
            assert found is not None
            prompts = prompt_logprobs(batch, found)
        if not batch.sampling_ids:
            return StepResult({}, failures, prompt_logprobs=prompts)
        logits = self._decoder.logits(hidden, batch.sample_rows)
        wanted, num_top = wanted_rows(batch)
        kept = logits[wanted] if wanted else None  # sampling overwrites them
        sampling, known = batch.sampling, None
        if batch.constrained:
            assert self.masks is not None
            patience_s = constraint.wait_s(time.perf_counter() - began)
            known = constraint.find(batch.constrained, self.masks, patience_s, vocab_size)
            failures.update(known.failures)
            sampling = with_masks(sampling, known)
        chosen = ops.sample(logits, sampling)
        if bool(chosen.failed.any()):
            lost = chosen.failed.nonzero().flatten().tolist()
            silent = known.silent if known is not None else ()
            lost_ids = [batch.sampling_ids[row] for row in lost]
            fail_alone(plan, [i for i in lost_ids if i not in silent], "no finite logits", failures)
        sampled_ids: list[int] = chosen.token_ids.tolist()
        logprobs: dict[RequestId, PositionLogProbs] = {}
        if kept is not None:
            found = ops.log_probs(kept, chosen.token_ids[wanted], num_top)
            logprobs = sampled_logprobs(batch, sampled_ids, found)
        return batch.result(sampled_ids, failures, logprobs, prompts, known, self.masks)


def fail_alone(
    plan: Plan, request_ids: Iterable[RequestId], cause: str, failures: dict[RequestId, VorrangError]
) -> None:
    """Log and add an ``InternalError`` to ``failures`` for each request that has none yet."""
    for request_id in request_ids:
        if request_id in failures:
            continue
        incident_id = secrets.token_hex(8)
        log.error(
            "runner.row_failed",
            incident_id=incident_id,
            request_id=request_id,
            step=plan.step,
            cause=cause,
        )
        failures[request_id] = InternalError(incident_id)


def _owners(tokens: Tensor, batch: Batch) -> list[RequestId]:
    """Requests that own any of the marked tokens; ``tokens`` is ``[T]`` bool."""
    marked = tokens.nonzero().flatten()
    rows = torch.searchsorted(batch.attention.query_start, marked, right=True) - 1
    return [batch.request_ids[row] for row in sorted(set(rows.tolist()))]
