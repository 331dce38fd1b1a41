"""Any other causal language model: transformers' own modules, with our paged attention as theirs.

Linear layers are packed for ``kernels.ops``, so that weight types hold here, too;
everything else is computed by the modules as they are. A row's bits may depend on
its neighbours. At load the model is tried: computed in two steps, it must give what
it gives with transformers' own attention, or it is refused.

Source of the way in: transformers' AttentionInterface.
"""

import ctypes
import dataclasses
import functools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import eos_token_ids
from engine.models.errors import InvalidCheckpoint, UnsupportedModel
from engine.models.lora import AdapterRows
from engine.models.sharding import Alone, Peers
from engine.models.values import read_json
from kernels import ops
from kernels.ops import AttentionInputs, PackedWeight, WeightType

#: Under which transformers knows our attention.
ATTENTION = "vorrang_paged"
#: How far logits may be apart when the model is tried, relative to the largest.
TRIAL_ERROR_MAX = 1e-3
_TRIAL_TOKENS = 24

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_AUTO_TYPES: dict[torch.dtype, WeightType] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """What a server must know of such a model.

    Attributes:
        architecture: class name in the checkpoint.
        vocab_size: rows of the embedding.
        max_positions: longest context, tokens.
        eos_token_ids: from ``config.json`` and ``generation_config.json``.
        num_layers: with attention; 0 until the model is loaded.
        num_kv_heads: likewise.
        head_dim: likewise.
    """

    architecture: str
    vocab_size: int
    max_positions: int
    eos_token_ids: frozenset[int]
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0

    @classmethod
    def from_folder(cls, folder: Path) -> "TransformersConfig":
        """Read ``config.json`` as transformers does.

        Raises:
            InvalidCheckpoint: a file is missing or malformed.
            UnsupportedModel: no causal language model that transformers knows.
        """
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config = read_json(folder / "config.json")
        architecture = (config.get("architectures") or [config.get("model_type")])[0]
        if config.get("quantization_config"):
            raise UnsupportedModel("quantization_config", "absent", config["quantization_config"])
        if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            raise UnsupportedModel("architecture", "a causal language model of transformers", architecture)
        try:
            known = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # theirs are of any kind
            raise InvalidCheckpoint(f"{folder / 'config.json'} cannot be read: {error}") from error
        if known.get_text_config() is not known:
            raise UnsupportedModel("architecture", "one for text alone", architecture)
        return cls(
            architecture,
            known.vocab_size,
            getattr(known, "max_position_embeddings", None) or 2048,
            eos_token_ids(folder, config),
        )


class TransformersDecoder:
    """A model of transformers with the interface of ``engine.models.decoder.Decoder``.

    Args:
        folder: with ``config.json`` and safetensors.
        config: read from it.
        weight_type: how the matrices of linear layers are kept; ``auto`` = as in the checkpoint.
        num_positions: longest context that will be served.

    Attributes:
        config: shape of the KV included.
        weight_type: how most matrices are kept.
        peers: none.

    Raises:
        InvalidCheckpoint: the files don't fit the model.
        UnsupportedModel: its attention can't be replaced, or gives something else then.
    """

    def __init__(
        self, folder: Path, config: TransformersConfig, weight_type: str, num_positions: int
    ) -> None:
        self.peers: Peers = Alone()
        self._model = _loaded(folder, config)
        _check_rope(self._model.config, num_positions)
        self.weight_type = _pack(self._model, weight_type)
        self._layers = _Layers(self._model.get_decoder())
        with torch.inference_mode():
            trial = torch.randint(
                config.vocab_size, (1, _TRIAL_TOKENS), generator=torch.Generator().manual_seed(0)
            )
            wanted, shape = self._looked_at(trial[0], config.architecture)
            num_layers, num_kv_heads, head_dim = shape
            self.config = dataclasses.replace(
                config, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim
            )
            self._try(trial[0], wanted)

    def forward(
        self,
        token_ids: Tensor,
        inputs: AttentionInputs,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        """Compute the step's tokens and store their KV; see ``Decoder.forward``. It has no adapters.

        Returns:
            ``[T, hidden]``, normed already where the model does so.
        """
        assert not adapters
        return self._layers.states(token_ids, inputs.positions, _Step(inputs, keys, values))

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """LM head, with whatever the model does to logits; see ``Decoder.logits``."""
        self._layers.given = ops.gather_last(hidden, rows).unsqueeze(0)
        try:
            found: Tensor = self._model(input_ids=torch.zeros(1, rows.shape[0], dtype=torch.int64)).logits
        finally:
            self._layers.given = None
        return found[0, :, : self.config.vocab_size].float().contiguous()

    def _looked_at(self, token_ids: Tensor, architecture: str) -> tuple[Tensor, tuple[int, int, int]]:
        """Logits by transformers' own attention, ``[T, vocab]``, and layers, KV heads and head size."""
        look = _Look()
        supported = "one that transformers lets compute with another attention"
        try:
            self._model.set_attn_implementation("eager")
            wanted: Tensor = self._model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0]
            self._model.set_attn_implementation(ATTENTION)
            self._layers.states(token_ids, torch.arange(token_ids.shape[0]), look)
        except (TypeError, ValueError, AttributeError, KeyError, RuntimeError, NotImplementedError) as error:
            raise UnsupportedModel("architecture", supported, architecture) from error
        if not look.shapes:
            raise UnsupportedModel("architecture", supported, architecture)
        if len(set(look.shapes)) > 1:
            raise UnsupportedModel("KV heads", "the same in every layer", sorted(set(look.shapes)))
        (num_kv_heads, key_dim, value_dim), *_ = look.shapes
        if key_dim != value_dim or key_dim % 2:
            raise UnsupportedModel(
                "head size", "even, and the same for keys and values", (key_dim, value_dim)
            )
        return wanted, (len(look.shapes), num_kv_heads, key_dim)

    def _try(self, token_ids: Tensor, wanted: Tensor) -> None:
        """Compute a few tokens in two steps over a pool of their own."""
        num_tokens, block_size = token_ids.shape[0], 16
        num_blocks = -(-num_tokens // block_size)
        shapes = ops.kv_cache_shapes(num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        keys, values = ([torch.zeros(shape) for _ in range(self.config.num_layers)] for shape in shapes)
        rows, begin = [], 0
        for end in (num_tokens // 3, num_tokens):
            places = torch.arange(begin, end)
            inputs = AttentionInputs(
                positions=places,
                slots=places,
                block_tables=torch.arange(num_blocks).unsqueeze(0),
                query_start=torch.tensor([0, end - begin]),
                context_lens=torch.tensor([end]),
            )
            hidden = self.forward(token_ids[begin:end], inputs, keys, values)
            rows.append(self.logits(hidden, torch.arange(end - begin)))
            begin = end
        wanted = wanted[:, : self.config.vocab_size].float()
        error = (torch.cat(rows) - wanted).abs().max() / wanted.abs().max()
        if not error <= TRIAL_ERROR_MAX:
            rule = f"one that paged attention changes by {TRIAL_ERROR_MAX} at most"
            raise UnsupportedModel("architecture", rule, f"{self.config.architecture}, {error:.2g}")


class _Step:
    """What our attention must know of a step; the layers ask one after the other."""

    def __init__(self, inputs: AttentionInputs, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._inputs, self._keys, self._values = inputs, keys, values
        self._layer = 0
        self._zeros = torch.zeros_like(inputs.positions)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store the layer's KV and attend; heads are ``[T, H, D]``, rotated where the model does so."""
        inputs, layer = self._inputs, self._layer
        self._layer += 1
        qkv = torch.cat((query, key, value), dim=1)
        still = torch.zeros(1, query.shape[2])  # position 0 turns nothing: all cosines 1, all sines 0
        still[:, : query.shape[2] // 2] = 1.0
        k_cache, v_cache = self._keys[layer], self._values[layer]
        q = ops.rotary_write_kv(qkv, still, self._zeros, inputs.slots, k_cache, v_cache)
        return ops.paged_attention(
            q,
            k_cache,
            v_cache,
            inputs.block_tables,
            inputs.query_start,
            inputs.context_lens,
            scale,
            window,
            softcap,
        )


class _Look:
    """In the place of a step: notes the shapes of every layer's KV, and computes nothing.

    Attributes:
        shapes: KV heads, size of a key, size of a value; one entry a layer.
    """

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, int]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        """Zeros of the right shape."""
        self.shapes.append((key.shape[1], key.shape[2], value.shape[2]))
        return query.new_zeros(*query.shape[:2], value.shape[2])


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: ``[1, H, T, D]`` to ``[1, T, H, D]``."""
    layers: _Layers = module.vorrang_layers
    assert layers.step is not None
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = layers.step.attend(q, k, v, scale, sliding_window, softcap)
    return out.unsqueeze(0), None


class _Layers:
    """A model's layers in the place of their ``forward``: computed, or left out where their result is given.

    Attributes:
        given: what they would give, ``[1, R, hidden]``, when the head alone is to be computed.
        step: what is computed, for ``_attention``, which finds this object at every module.
    """

    def __init__(self, module: Any) -> None:
        self._compute = module.forward
        self._output: Any = None
        self.given: Tensor | None = None
        self.step: _Step | _Look | None = None
        module.forward = self._forward
        for part in module.modules():
            part.vorrang_layers = self

    def states(self, token_ids: Tensor, positions: Tensor, step: "_Step | _Look") -> Tensor:
        """What the layers give for tokens ``[T]`` at positions ``[T]``: ``[T, hidden]``."""
        self.step = step
        try:
            out = self._compute(
                input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            )
        finally:
            self.step = None
        self._output = type(out)
        states: Tensor = out.last_hidden_state
        return states[0]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.given is None:
            return self._compute(*args, **kwargs)
        return self._output(last_hidden_state=self.given)


class _PackedLinear(nn.Module):
    """A linear layer on ``kernels.ops``."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self._packed, self._bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` over the last dimension."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return ops.linear(rows, self._packed, self._bias).view(*x.shape[:-1], -1)


class _PackedEmbedding(nn.Module):
    """An embedding whose matrix is the LM head's, too."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self._packed = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding."""
        return ops.embed(token_ids.flatten().contiguous(), self._packed).view(*token_ids.shape, -1)


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _loaded(folder: Path, config: TransformersConfig) -> Any:
    """Transformers' model with its weights in the dtype of the checkpoint."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    _register()
    logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise InvalidCheckpoint(f"{folder} does not hold a {config.architecture}: {error}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if found[kind]:
            name = min(map(str, found[kind]))
            raise InvalidCheckpoint(f"tensor {name} is missing, or of another shape")
    return model.eval().requires_grad_(False)


def _check_rope(config: Any, num_positions: int) -> None:
    """These modules choose long factors by the longest request of a step, which neighbours must not."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and num_positions > rope["original_max_position_embeddings"]:
        original = rope["original_max_position_embeddings"]
        raise UnsupportedModel("longrope context", f"at most the original {original} tokens", num_positions)


def _give_back(matrix: Tensor) -> None:
    """Give back the memory under a matrix that nobody reads any more.

    transformers leaves weights in the mapped file, whose pages would stay in memory until the
    last of them is dropped.
    """
    begin, end = matrix.data_ptr(), matrix.data_ptr() + matrix.nbytes
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        _madvise(begin, end - begin, mmap.MADV_DONTNEED)


def _pack(model: Any, weight_type: str) -> str:
    """Pack the linear layers one by one, and make what is left float32; how most matrices are kept."""
    from transformers.pytorch_utils import Conv1D

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = type(embedding) is nn.Embedding and head is not None and head.weight is embedding.weight
    kinds: list[WeightType] = []
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            matrix = module.weight
        elif type(module) is Conv1D:
            matrix = module.weight.t()
        else:
            continue
        kind: Any = _AUTO_TYPES.get(matrix.dtype, "fp32") if weight_type == "auto" else weight_type
        kinds.append(kind)
        bias = None if module.bias is None else module.bias.detach().float()
        packed = _PackedLinear(ops.pack_linear(matrix.detach(), kind), bias)
        if tied and module is head:
            model.set_input_embeddings(_PackedEmbedding(packed._packed))
        model.set_submodule(name, packed)
        if all(matrix.data_ptr() != other.data_ptr() for other in model.parameters()):
            _give_back(matrix)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return max(set(kinds), key=kinds.count) if kinds else "fp32"
