"""How rows of logits sample, for tests of kernels."""

import torch

from kernels.interface import AllowedIds, SamplingInputs


def sampling_inputs(
    rows,
    *,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    typical_p=None,
    seed=0,
    index=0,
    banned=(),
    allowed=None,
    adjust=None,
):
    """One setting for all rows, or a list with one a row; ``allowed`` is a mapping of row to ids."""

    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return SamplingInputs(
        temperature=column(temperature, torch.float64),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float64),
        min_p=column(min_p, torch.float64),
        seed=column(seed, torch.int64),
        output_index=column(index, torch.int64),
        banned_rows=torch.tensor([row for row, _ in banned], dtype=torch.int64),
        banned_ids=torch.tensor([token for _, token in banned], dtype=torch.int64),
        adjustments=adjust,
        allowed=None if allowed is None else _allowed(allowed),
        typical_p=None if typical_p is None else column(typical_p, torch.float64),
    )


def _allowed(by_row):
    pairs = [(row, token) for row, ids in by_row.items() for token in ids]
    return AllowedIds(torch.tensor(list(by_row)), *(torch.tensor(ids) for ids in zip(*pairs, strict=True)))
