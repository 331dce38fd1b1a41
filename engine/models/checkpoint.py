"""The tensors of a folder of safetensors files, memory-mapped, and how one of them is packed.

One matrix at a time is read from the mapped file and packed, so that loading
needs little more memory than the result. Fused projections are views across
neighbours in the file where it has them side by side, which is how
``engine.models.gguf`` writes them.
"""

import json
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.errors import InvalidCheckpoint
from engine.models.values import read_json
from kernels import ops
from kernels.ops import PackedWeight, Projection, WeightType

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

#: The type each tensor has in the file; float32 where it is none of the weight types.
Auto = Literal["auto"]

_ALL = slice(None)
_AUTO_TYPES: dict[torch.dtype, WeightType] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a matrix of the file, or of its bias.

    Attributes:
        shape: of the whole matrix.
        rows: which are taken.
        columns: likewise.
        order: the order of the rows that are taken; None = as in the file.
    """

    shape: tuple[int, int]
    rows: slice = field(default_factory=lambda: _ALL)
    columns: slice = field(default_factory=lambda: _ALL)
    order: Tensor | None = None

    def of(self, matrix: Tensor) -> Tensor:
        """The part of a matrix: a view where the order is that of the file."""
        part = matrix[self.rows, self.columns]
        return part if self.order is None else part.index_select(0, self.order)

    def of_bias(self, bias: Tensor) -> Tensor:
        """The part of a bias of the matrix's rows."""
        part = bias[self.rows]
        return part if self.order is None else part.index_select(0, self.order)


class MappedFile:
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
        except (SafetensorError, OSError, ValueError, RecursionError, MemoryError) as error:
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
            try:
                copied: Tensor = self._checked.get_tensor(name)
            except (SafetensorError, ValueError, AttributeError, RuntimeError) as error:
                rule = "of a type that can be read"
                raise InvalidCheckpoint(f"tensor {name} must be {rule}, got {entry['dtype']}") from error
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


class TensorSource:
    """The tensors of a folder by name; each should be taken once.

    Attributes:
        advance: is told how many bytes were read since the last time.
    """

    def __init__(self, folder: Path, weight_type: WeightType | Auto, device: torch.device) -> None:
        self._weight_type = weight_type
        self._device = device
        self.advance: Callable[[int], None] = _say_nothing
        self._files: dict[str, MappedFile] = {}
        paths = list(_weight_files(folder))
        for path in paths:
            file = MappedFile(path)
            self._files |= dict.fromkeys(file.names, file)
        self.num_bytes = sum(path.stat().st_size for path in paths)
        self._left = {name for name in self._files if not name.endswith(".rotary_emb.inv_freq")}

    def vector(self, name: str, size: int) -> Tensor:
        """The tensor ``name`` of one dimension, a float32 copy."""
        return self._take(name, (size,)).to(self._device, torch.float32, copy=True)

    def matrix(self, name: str, part: Part, *, exact: bool = False) -> PackedWeight:
        """A part of the tensor ``name``, packed; ``exact``: as in the file, whatever the weight type."""
        return self._packed([(name, part)], "auto" if exact else self._weight_type)

    def project(
        self, prefix: str, parts: list[tuple[str, Part]], *, bias: bool, adds_bias: bool = True
    ) -> Projection:
        """Parts of linear layers, by name, fused along the rows.

        Args:
            prefix: of their names.
            parts: what is taken of which.
            bias: whether the checkpoint has biases for them.
            adds_bias: whether this rank adds them.
        """
        weight = self._packed([(f"{prefix}{name}.weight", part) for name, part in parts], self._weight_type)
        if not bias:
            return Projection(weight)
        biases = [part.of_bias(self.vector(f"{prefix}{name}.bias", part.shape[0])) for name, part in parts]
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

    def _packed(self, parts: list[tuple[str, Part]], weight_type: WeightType | Auto) -> PackedWeight:
        """The parts stacked along the rows and packed; the file's memory is given back."""
        whole = {name: self._take(name, part.shape) for name, part in parts}
        weights = [part.of(whole[name]) for name, part in parts]
        dtypes = {weight.dtype for weight in weights}
        if len(dtypes) > 1:
            weights = [weight.float() for weight in weights]
        if weight_type == "auto":
            weight_type = _AUTO_TYPES.get(weights[0].dtype, "fp32")
        joined = _join(weights)
        if joined.data_ptr() != weights[0].data_ptr():  # a copy, which stands in for the file from here on
            self._release(whole)
        packed = ops.pack_linear(joined.to(self._device), weight_type)
        self._release(whole)
        self.advance(sum(tensor.nbytes for tensor in whole.values()))
        return packed

    def _release(self, names: Iterable[str]) -> None:
        for name in names:
            self._files[name].release(name)

    def ignore(self, name: str) -> None:
        """Do not mind ``name``."""
        self._left.discard(name)

    def check_all_taken(self) -> None:
        """Raise InvalidCheckpoint if a tensor was left over: the model would not be what it seems."""
        if self._left:
            raise InvalidCheckpoint(f"tensor {min(self._left)} is not part of this architecture")


def _say_nothing(num_bytes: int) -> None:
    """Nobody watches."""


def _weight_files(folder: Path) -> Iterable[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise InvalidCheckpoint(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    shards = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InvalidCheckpoint(f"{folder / INDEX_FILE} must hold a weight_map")
    names = sorted(set(map(str, shards.values())))
    for name in names:  # by name: in the hub's cache they are links to files elsewhere
        if Path(name).name != name:
            raise InvalidCheckpoint(f"{INDEX_FILE} must name files of its own folder, got {name}")
    paths = [folder / name for name in names]
    for path in paths:
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
