"""What a step on a device brings back to the host: one row of words, and what it means."""

import itertools

from torch import Tensor

from engine.events import PositionLogProbs, PromptLogProbs
from engine.request import RequestId
from engine.runner import logprobs
from engine.runner.batch import Batch
from engine.runner.logprobs import wanted_rows


class Report:
    """What a step brings to the host, as one row of words.

    ``[2 R + S + ...]`` int64: ids of the R rows that sample, whether each of them failed, how many of
    each request's hidden states are not finite, then log probabilities of tokens and of prompts.

    Args:
        batch: the step, padded.
        words: the report.
    """

    def __init__(self, batch: Batch, words: Tensor) -> None:
        self._batch = batch
        self._num_top = wanted_rows(batch)[1]
        self._num_score_top = max((scored.num_top for scored in batch.scored), default=0)
        num_sampling, num_wanted = len(batch.sampling_ids), len(batch.num_logprobs)
        sizes = [num_sampling, num_sampling, batch.attention.context_lens.shape[0]]
        sizes.append(logprobs.num_words(num_wanted, self._num_top))
        sizes.append(logprobs.num_words(batch.score_rows.shape[0], self._num_score_top))
        ends = list(itertools.accumulate(sizes))
        self._parts = [words[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def token_ids(self) -> list[int]:
        """Of the rows that sample."""
        return self._parts[0].tolist()

    def failed(self) -> list[int]:
        """Whether each of these failed."""
        return self._parts[1].tolist()

    def broken(self) -> list[int]:
        """How many of each request's hidden states are not finite."""
        return self._parts[2].tolist()

    def logprobs(self, token_ids: list[int]) -> dict[RequestId, PositionLogProbs]:
        """Of the sampled tokens, for who wants them."""
        num_rows = len(self._batch.num_logprobs)
        if not num_rows:
            return {}
        found = logprobs.from_words(self._parts[3], num_rows, self._num_top)
        return logprobs.sampled_logprobs(self._batch, token_ids, found)

    def prompt_logprobs(self) -> dict[RequestId, PromptLogProbs]:
        """Of the prompts that are scored."""
        num_rows = self._batch.score_rows.shape[0]
        if not num_rows:
            return {}
        found = logprobs.from_words(self._parts[4], num_rows, self._num_score_top)
        return logprobs.prompt_logprobs(self._batch, found)
