"""Low-rank adapters as a step computes them, on ``kernels.ops``: which rows they change, and by what.

The base's projections stay as they are. To the rows of a request with an adapter
``x A^T B^T * scale`` is added, adapter by adapter; no weight is ever merged, so any
adapters may share a step. Source: Hu et al., "LoRA: Low-Rank Adaptation of Large
Language Models", 2021. How adapters are read is not known here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from kernels import ops
from kernels.ops import PackedWeight, Projection

#: The projections of a layer, fused as the base has them.
Site = Literal["qkv", "attention_out", "gate_up", "down"]


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one projection.

    Attributes:
        a: ``[rank, n_in]`` float32, packed; of a fused projection, those of its parts one below the other.
        b: ``[n_out, rank]`` likewise, its scale multiplied in; of a fused projection, zero where a part's
            result does not depend on another part's rank.
    """

    a: PackedWeight
    b: PackedWeight


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """What an adapter adds to the projections of one layer; None = nothing."""

    qkv: LowRank | None = None
    attention_out: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter.

    Attributes:
        name: under which requests ask for it.
        layers: one entry a layer of the model.
        rank: of its matrices.
    """

    name: str
    layers: tuple[LayerAdapter, ...]
    rank: int

    @property
    def num_bytes(self) -> int:
        """Memory of its packed matrices."""
        found = [getattr(layer, site) for layer in self.layers for site in LayerAdapter.__slots__]
        return sum(low.a.num_bytes + low.b.num_bytes for low in found if low is not None)


class AdapterRows(NamedTuple):
    """Tokens of a step that are computed with an adapter.

    Attributes:
        name: of the adapter.
        rows: ``[n]`` int64, their places in the step, ascending.
    """

    name: str
    rows: Tensor


class LayerRows(NamedTuple):
    """Likewise, of one layer."""

    adapter: LayerAdapter
    rows: Tensor


def of_layer(adapters: Mapping[str, Adapter], rows: Sequence[AdapterRows], layer: int) -> list[LayerRows]:
    """What a step's adapters add in one layer."""
    return [LayerRows(adapters[name].layers[layer], places) for name, places in rows]


def linear(x: Tensor, weights: Projection, site: Site, adapters: Sequence[LayerRows] = ()) -> Tensor:
    """A projection, ``[T, n_in]`` to ``[T, n_out]``, and what each adapter adds to its rows.

    Invariant: a row's bits depend on its own adapter alone, as far as those of ``ops.linear`` do not depend
    on its neighbours.
    """
    out = ops.linear(x, weights.weight, weights.bias)
    for adapter, rows in adapters:
        low: LowRank | None = getattr(adapter, site)
        if low is None:
            continue
        if rows.shape[0] == x.shape[0]:  # all of them
            out.add_(ops.linear(ops.linear(x, low.a), low.b))
        else:
            out.index_add_(0, rows, ops.linear(ops.linear(x.index_select(0, rows), low.a), low.b))
    return out
