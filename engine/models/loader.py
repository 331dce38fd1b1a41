"""Weights from a folder of safetensors files, memory-mapped and packed for the active kernels.

One matrix at a time is read from the mapped file and packed, so that loading
needs little more memory than the result. Fused projections are views across
neighbours in the file where it has them side by side, which is how
``engine.models.gguf`` writes them.
"""

import json
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import DecoderConfig, read_json
from engine.models.decoder import DecoderWeights
from engine.models.errors import InvalidCheckpoint
from engine.models.sharding import Shard
from kernels import ops
from kernels.ops import LayerWeights, PackedWeight, Projection, WeightType

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


#: The type each tensor has in the file; float32 where it is none of the weight types.
Auto = Literal["auto"]

_ALL = slice(None)
_WHOLE = Shard()
_AUTO_TYPES: dict[torch.dtype, WeightType] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def load_weights(
    folder: Path,
    config: DecoderConfig,
    weight_type: WeightType | Auto = "auto",
    *,
    shard: Shard = _WHOLE,
    device: torch.device | str = "cpu",
) -> DecoderWeights:
    """Read the weights of ``config`` from ``folder``, or one rank's share of them.

    Only the share is read from the mapped file, as far as pages of the file allow.

    Args:
        folder: with the safetensors files.
        config: what they must match: of the whole model, for a rank, too.
        weight_type: how matrices are kept; ``auto`` = exactly, in the dtype of the file. Norms
            and biases are float32.
        shard: whose share.
        device: where they are to be packed and kept.

    Raises:
        InvalidCheckpoint: a file is missing or damaged, or a tensor is missing,
            unknown or of another shape than the configuration says.
    """
    source = _TensorSource(folder, weight_type, torch.device(device))
    shares = _Shares(config, shard)
    hidden = config.hidden_size
    embedding = source.matrix("model.embed_tokens.weight", shares.vocabulary)
    decoder_layers = tuple(
        _layer(source, f"model.layers.{index}", config, shares) for index in range(config.num_layers)
    )
    norm = source.vector("model.norm.weight", hidden)
    if config.tie_embeddings:
        source.ignore("lm_head.weight")
        lm_head = embedding
    else:
        lm_head = source.matrix("lm_head.weight", shares.vocabulary)
    source.check_all_taken()
    return DecoderWeights(embedding, decoder_layers, norm, lm_head)


@dataclass(frozen=True, slots=True)
class _Share:
    """A part of a matrix ``shape`` in the file."""

    shape: tuple[int, int]
    rows: slice = field(default_factory=lambda: _ALL)
    columns: slice = field(default_factory=lambda: _ALL)


class _Shares:
    """What one rank takes of each matrix: rows where its results are its own, columns where they are summed.

    A bias that is summed belongs to rank 0, or it would be added by every rank.
    """

    def __init__(self, config: DecoderConfig, shard: Shard) -> None:
        def heads(part: slice) -> slice:
            return slice(part.start * config.head_dim, part.stop * config.head_dim)

        hidden, intermediate = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_rows, kv_rows = heads(shard.q_heads(config)), heads(shard.kv_heads(config))
        mlp_rows = shard.part(intermediate)
        self.vocabulary = _Share((config.vocab_size, hidden), shard.part(config.vocab_size))
        self.q = _Share((q_size, hidden), q_rows)
        self.kv = _Share((kv_size, hidden), kv_rows)
        self.attention_out = _Share((hidden, q_size), columns=q_rows)
        self.gate_up = _Share((intermediate, hidden), mlp_rows)
        self.down = _Share((hidden, intermediate), columns=mlp_rows)
        self.adds_bias = shard.rank == 0


def _layer(source: "_TensorSource", name: str, config: DecoderConfig, shares: _Shares) -> LayerWeights:
    hidden, attention = config.hidden_size, f"{name}.self_attn"

    def head_norm(which: str) -> Tensor | None:
        return source.vector(f"{attention}.{which}.weight", config.head_dim) if config.qk_norm else None

    return LayerWeights(
        attention_norm=source.vector(f"{name}.input_layernorm.weight", hidden),
        qkv=source.project(
            attention,
            {"q_proj": shares.q, "k_proj": shares.kv, "v_proj": shares.kv},
            bias=config.attention_bias,
        ),
        attention_out=source.project(
            attention,
            {"o_proj": shares.attention_out},
            bias=config.attention_bias,
            adds_bias=shares.adds_bias,
        ),
        mlp_norm=source.vector(f"{name}.post_attention_layernorm.weight", hidden),
        gate_up=source.project(
            f"{name}.mlp", {"gate_proj": shares.gate_up, "up_proj": shares.gate_up}, bias=config.mlp_bias
        ),
        down=source.project(
            f"{name}.mlp", {"down_proj": shares.down}, bias=config.mlp_bias, adds_bias=shares.adds_bias
        ),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
    )


class _MappedFile:
    """One safetensors file in memory; its tensors share one storage.

    The library checks the file; only where a tensor lies is read here, because
    the library gives every tensor a storage of its own, which cannot be fused.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._checked: Any = safe_open(path, framework="pt", device="cpu")
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(header_bytes))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        except (SafetensorError, OSError, ValueError) as error:
            raise InvalidCheckpoint(f"{path} is no readable safetensors file: {error}") from error
        self._data_start = 8 + header_bytes
        self._entries = {name: entry for name, entry in header.items() if name != "__metadata__"}

    @property
    def names(self) -> Iterable[str]:
        """Names of its tensors."""
        return self._entries

    def tensor(self, name: str) -> Tensor:
        """A view into the file, or a copy where its place does not suit its type."""
        entry = self._entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        begin, end = self._place(name)
        if dtype is None or begin % dtype.itemsize:
            copied: Tensor = self._checked.get_tensor(name)
            return copied
        return self._bytes[begin:end].view(dtype).view(entry["shape"])

    def release(self, name: str) -> None:
        """Give the memory under a tensor back; whoever reads it again reads the file again."""
        begin, end = self._place(name)
        begin += -begin % mmap.PAGESIZE
        length = (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, begin, length)

    def _place(self, name: str) -> tuple[int, int]:
        """First byte of a tensor in the file, and the one after its last."""
        begin, end = self._entries[name]["data_offsets"]
        return self._data_start + begin, self._data_start + end


class _TensorSource:
    """The tensors of a folder by name; each should be taken once."""

    def __init__(self, folder: Path, weight_type: WeightType | Auto, device: torch.device) -> None:
        self._weight_type = weight_type
        self._device = device
        self._files: dict[str, _MappedFile] = {}
        for path in _weight_files(folder):
            file = _MappedFile(path)
            self._files |= dict.fromkeys(file.names, file)
        self._left = {name for name in self._files if not name.endswith(".rotary_emb.inv_freq")}

    def vector(self, name: str, size: int, part: slice = _ALL) -> Tensor:
        """The tensor ``name`` of one dimension, or a part of it, a float32 copy."""
        return self._take(name, (size,))[part].to(self._device, torch.float32, copy=True)

    def matrix(self, name: str, share: _Share) -> PackedWeight:
        """A share of the tensor ``name``, packed."""
        return self._packed({name: share})

    def project(
        self, prefix: str, layers: Mapping[str, _Share], *, bias: bool, adds_bias: bool = True
    ) -> Projection:
        """Shares of the linear layers ``layers`` (by name), fused along the rows.

        Args:
            prefix: of their names.
            layers: which.
            bias: whether the checkpoint has biases for them.
            adds_bias: whether this rank adds them.
        """
        weight = self._packed({f"{prefix}.{name}.weight": share for name, share in layers.items()})
        if not bias:
            return Projection(weight)
        biases = [
            self.vector(f"{prefix}.{name}.bias", share.shape[0], share.rows) for name, share in layers.items()
        ]
        return Projection(weight, torch.cat(biases) if adds_bias else None)

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``name`` as it is in the mapped file."""
        if name not in self._files:
            raise InvalidCheckpoint(f"tensor {name} is missing")
        tensor = self._files[name].tensor(name)
        if tuple(tensor.shape) != shape:
            raise InvalidCheckpoint(f"tensor {name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise InvalidCheckpoint(f"tensor {name} must be of a floating point type, got {tensor.dtype}")
        self._left.discard(name)
        return tensor

    def _packed(self, shares: Mapping[str, _Share]) -> PackedWeight:
        """The shares (by name) stacked along the rows and packed; the file's memory is given back."""
        weights = [self._take(name, share.shape)[share.rows, share.columns] for name, share in shares.items()]
        dtypes = {weight.dtype for weight in weights}
        if len(dtypes) > 1:
            weights = [weight.float() for weight in weights]
        weight_type = self._weight_type
        if weight_type == "auto":
            weight_type = _AUTO_TYPES.get(weights[0].dtype, "fp32")
        packed = ops.pack_linear(_join(weights).to(self._device), weight_type)
        for name in shares:
            self._files[name].release(name)
        return packed

    def ignore(self, name: str) -> None:
        """Do not mind ``name``."""
        self._left.discard(name)

    def check_all_taken(self) -> None:
        """Raise InvalidCheckpoint if a tensor was left over: the model would not be what it seems."""
        if self._left:
            raise InvalidCheckpoint(f"tensor {min(self._left)} is not part of this architecture")


def _weight_files(folder: Path) -> Iterable[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise InvalidCheckpoint(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    shards = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InvalidCheckpoint(f"{folder / INDEX_FILE} must hold a weight_map")
    paths = [folder / name for name in sorted(set(shards.values()))]
    for path in paths:
        if path.resolve().parent != folder.resolve():
            raise InvalidCheckpoint(f"{INDEX_FILE} must name files of its own folder, got {path}")
        if not path.is_file():
            raise InvalidCheckpoint(f"shard {path.name} is missing in {folder}")
    return paths


def _join(tensors: list[Tensor]) -> Tensor:
    """Stack along the rows: a view if they are neighbours in one mapped file, a copy if not."""
    first = tensors[0]
    end = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        neighbour = tensor.untyped_storage().data_ptr() == storage and tensor.storage_offset() == end
        if not (neighbour and tensor.is_contiguous()):
            return torch.cat(tensors)
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
