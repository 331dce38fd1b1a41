"""All layers of a model as one call into ``cpu.cpp``, with the bits of the operations one by one."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu_library import TYPES, address, function, is_plain
from kernels.interface import AttentionInputs, LayerStack, LayerWeights, Projection, RunLayers

_layers = function("layers", "p", "pp", "ppppp", "iii", result=ctypes.c_int64)


class _Projection(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("type", "num_inputs", "num_outputs")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm")),
        *((name, _Projection) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache")),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("rope", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_layers",
                "num_q_heads",
                "num_kv_heads",
                "head_dim",
                "num_positions",
                "num_blocks",
                "pages_per_block",
            )
        ),
        *((name, ctypes.c_float) for name in ("norm_eps", "scale")),
    )


class _FusedLayers:
    """All layers in one call. Holds the weights whose addresses it gives, and room for results between."""

    def __init__(self, stack: LayerStack) -> None:
        self._stack = stack
        self._caches: tuple[Tensor, ...] = ()
        self._layers = (_Layer * len(stack.layers))(*map(_layer, stack.layers))
        self._struct = _Stack(
            self._layers,
            stack.rope.data_ptr(),
            len(stack.layers),
            stack.num_q_heads,
            stack.num_kv_heads,
            stack.head_dim,
            stack.rope.shape[0],
            0,  # blocks and
            0,  # pages of a block: known when the caches are
            stack.norm_eps,
            stack.scale,
        )
        self._address = ctypes.addressof(self._struct)
        first, q_size = self._layers[0], stack.num_q_heads * stack.head_dim
        self._row_floats = (
            2 * first.qkv.num_inputs
            + first.qkv.num_outputs
            + 2 * q_size
            + first.gate_up.num_outputs
            + first.down.num_inputs
        )
        self._buffer = torch.empty(0)

    def __call__(
        self, hidden: Tensor, inputs: AttentionInputs, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """See ``RunLayers``."""
        num_tokens = hidden.shape[0]
        assert is_plain(hidden)
        assert inputs.block_tables.is_contiguous()
        if not self._caches or self._caches[0] is not keys[0]:
            self._take_caches(keys, values)
        if self._buffer.numel() < num_tokens * self._row_floats:
            self._buffer = torch.empty(num_tokens * self._row_floats)
        done = _layers(
            self._address,
            hidden.data_ptr(),
            self._buffer.data_ptr(),
            inputs.positions.data_ptr(),
            inputs.slots.data_ptr(),
            inputs.block_tables.data_ptr(),
            inputs.query_start.data_ptr(),
            inputs.context_lens.data_ptr(),
            num_tokens,
            inputs.context_lens.shape[0],
            inputs.block_tables.shape[1],
        )
        if not done:
            raise IndexError("the step names a position, slot or block that does not exist")
        return hidden

    def _take_caches(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._caches = (*keys, *values)
        self._struct.num_blocks, self._struct.pages_per_block = keys[0].shape[:2]
        for layer, k_cache, v_cache in zip(self._layers, keys, values, strict=True):
            layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()


def _layer(layer: LayerWeights) -> _Layer:
    assert layer.attention_norm is not None, "not a plain layer"
    assert layer.mlp_norm is not None, "not a plain layer"
    assert layer.gate_up is not None, "not a plain layer"
    assert layer.down is not None, "not a plain layer"
    return _Layer(
        layer.attention_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        *map(_projection, (layer.qkv, layer.attention_out, layer.gate_up, layer.down)),
    )


def _projection(projection: Projection) -> _Projection:
    weight = projection.weight
    return _Projection(
        weight.data.data_ptr(),
        address(weight.scales),
        address(projection.bias),
        TYPES[weight.weight_type],
        weight.num_inputs,
        weight.num_outputs,
    )


def fuse_layers(stack: LayerStack) -> RunLayers:
    """One call for all layers instead of nine for each."""
    return _FusedLayers(stack)
