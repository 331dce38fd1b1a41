"""All operations on a card: the implementation ``triton`` of ``kernels.interface.Implementation``.

Kernels of this package where a fused one reads memory less often, torch where a
library call is as good: picking rows, bounding logits, choosing experts, and matrix
products of floating point weights unless they must be batch-invariant. Launches
alone; nothing waits for the card.

Importing needs triton; whether anything can run is ``available``'s to say. With
``TRITON_INTERPRET=1`` kernels run on CPU tensors, slowly, for tests.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.gpu import linear as tiles
from kernels.gpu import paged_attention as attention
from kernels.gpu.activation import gelu_mul, silu_mul
from kernels.gpu.device import INTERPRETING
from kernels.gpu.kv_layout import kv_cache_shapes
from kernels.gpu.log_probs import argmax, log_probs, log_sum_exp
from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.rotary_write_kv import rotary_write_kv
from kernels.gpu.sample import sample
from kernels.interface import LayerStack, PackedWeight, RunLayers, WeightType
from kernels.reference import route, softcap
from kernels.weights import quantised, quantised_fp8, rounded

__all__ = [
    "activation_dtype",
    "add_rms_norm",
    "argmax",
    "embed",
    "fuse_layers",
    "gather_last",
    "gelu_mul",
    "kv_cache_shapes",
    "linear",
    "log_probs",
    "log_sum_exp",
    "logits",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary_write_kv",
    "route",
    "sample",
    "set_batch_invariant",
    "set_num_threads",
    "silu_mul",
    "softcap",
]

_batch_invariant = False


def set_num_threads(num_threads: int) -> None:
    """A card has its own; torch's operations on the host get them."""
    torch.set_num_threads(num_threads)


def set_batch_invariant(enabled: bool) -> None:
    """On, every matrix product takes the one fixed tile, and all queries one attention kernel."""
    global _batch_invariant
    _batch_invariant = enabled


def activation_dtype(weight_type: WeightType) -> torch.dtype:
    """What activations are made of between weights of this type.

    Bfloat16 but for float16 weights: the attention kernels have no float32 on a card. The interpreter
    has, so that tests can tell wrong arithmetic from rounding.
    """
    if weight_type == "fp16":
        return torch.float16
    return torch.float32 if weight_type == "fp32" and INTERPRETING else torch.bfloat16


def pack_linear(weight: Tensor, weight_type: WeightType) -> PackedWeight:
    """Rows without gaps. Floating point stays where it is if it can; e4m3 is kept as bytes."""
    scales = None
    if weight_type == "int8":
        data, scales = quantised(weight)
    elif weight_type == "fp8":
        numbers, scales = quantised_fp8(weight)
        data = numbers.view(torch.uint8)
    else:
        data = rounded(weight, weight_type)
    return PackedWeight(data.contiguous(), scales, weight.shape[0], weight.shape[1], weight_type)


def embed(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows of ``weight``; what decides the dtype of all activations after it."""
    rows = weight.data.index_select(0, token_ids)
    dtype = activation_dtype(weight.weight_type)
    if weight.scales is None:
        return rows.to(dtype)
    if weight.weight_type == "fp8":
        rows = rows.view(torch.float8_e4m3fn)
    return (rows.float() * weight.scales.index_select(0, token_ids).unsqueeze(1)).to(dtype)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Torch's product for floating point weights, the tiles for the others and for the fixed order."""
    data = weight.data
    if weight.scales is not None:
        return tiles.linear(x, data, weight.scales, bias, out_dtype=x.dtype, fixed=_batch_invariant)
    wide = x.to(data.dtype)  # a no-op but for matrices of another type than the embedding
    if _batch_invariant:
        out = tiles.linear(wide, data, None, bias, out_dtype=data.dtype, fixed=True)
    else:
        out = F.linear(wide, data, None if bias is None else bias.to(data.dtype))
    return out.to(x.dtype)


def logits(x: Tensor, weight: PackedWeight) -> Tensor:
    """The tiles, whose sums are float32 and stay so."""
    wide = x if weight.scales is not None else x.to(weight.data.dtype)
    return tiles.linear(
        wide, weight.data, weight.scales, None, out_dtype=torch.float32, fixed=_batch_invariant
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Decodes split along their context, chunks in tiles; in batch-invariant mode all in tiles."""
    return attention.paged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        context_lens,
        scale,
        window,
        softcap,
        batch_invariant=_batch_invariant,
    )


def gather_last(x: Tensor, rows: Tensor) -> Tensor:
    """Torch's own."""
    return x.index_select(0, rows)


def fuse_layers(stack: LayerStack) -> RunLayers | None:
    """The operations one by one; graphs, which make many launches cheap, are the runner's business."""
    return None
