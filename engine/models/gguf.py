"""GGUF files: converted once into a Hugging Face style folder in a local cache.

The folder holds float32 weights in the checkpoint's own order, so that they can
be memory-mapped and fused without a copy, and the tokenizer with its chat
template. Knows nothing of torch: numpy turns blocks of quantised numbers into
floats, one tensor at a time.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from engine.models.config import DecoderConfig
from engine.models.errors import CacheUnusable, InvalidCheckpoint, ModelNotFound, UnsupportedModel
from engine.models.gguf_config import GgufTensor, config_of, family_of, tensors_of
from engine.models.gguf_header import check_header
from engine.models.gguf_tokenizer import write_tokenizer
from engine.models.progress import progress
from engine.models.values import understood
from kernels import private_folder

#: Part of the cache key; raise it whenever the content of a converted folder changes.
FORMAT_VERSION = 2

_HEADER_BYTES = 2**20
#: They scale rotary positions, and become a part of the configuration.
_ROPE_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}

Float32Array = NDArray[np.float32]


def converted_folder(path: Path, cache_dir: Path) -> Path:
    """The folder that holds ``path`` converted, converting it first if there is none.

    One process converts, others wait for it. The folder appears complete or
    not at all. Its name holds a key of the file's size, time of change and
    first bytes; a changed file is converted anew.

    Raises:
        ModelNotFound: there is no such file.
        InvalidCheckpoint: the file is damaged or lacks something.
        UnsupportedModel: another architecture, rope scaling or tokenizer.
        CacheUnusable: ``cache_dir`` cannot be written, or others may write it.
    """
    name = f"{path.stem}-{_key(path)}"
    try:
        folder = private_folder.checked(cache_dir / "models" / name)
        if not folder.is_dir():
            _convert_once(path, private_folder.made(cache_dir / "models") / name)
        for file in folder.iterdir():
            private_folder.check_file(file)
    except OSError as error:
        raise CacheUnusable(f"cache folder {cache_dir} cannot be used: {error}") from error
    return folder


def _convert_once(path: Path, folder: Path) -> None:
    with _locked(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed
        partial.mkdir(mode=0o700)
        convert(path, partial)
        for file in partial.iterdir():
            file.chmod(0o600)
        partial.rename(folder)


def convert(path: Path, folder: Path) -> None:
    """Write the model in the GGUF file ``path`` into ``folder``, which exists and is empty.

    Raises:
        InvalidCheckpoint: the file is damaged or lacks something.
        UnsupportedModel: another architecture, rope scaling or tokenizer.
    """
    check_header(path)
    with understood(f"GGUF file {path}"):
        _convert(path, folder)


def _convert(path: Path, folder: Path) -> None:
    """``convert`` for a file whose header is sound; its values may be of any kind."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = {name: _dequantised(tensors.pop(name)).tolist() for name in _ROPE_TENSORS & tensors.keys()}
    config = config_of(fields, factors, tied="output.weight" not in tensors)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    write_tokenizer(fields, folder, max_tokens=config["max_position_embeddings"])
    decoder = DecoderConfig.from_dict(config)
    num_experts = 1 if decoder.moe is None else decoder.moe.num_experts
    # One by one: there are no more than the file has tensors for, whatever its metadata say.
    plan = [
        _checked(part, tensors, num_experts)
        for part in tensors_of(decoder, permuted=family_of(fields).permuted)
    ]
    _write_weights(tensors, plan, decoder.norm_offset, folder / "model.safetensors")


def _write_weights(
    tensors: dict[str, Any], plan: Sequence[GgufTensor], norm_offset: float, path: Path
) -> None:
    """Write a safetensors file, float32, one tensor of the GGUF file at a time.

    Source of the format: the safetensors README. The library's own writer
    wants all tensors at once and chooses their order.
    """
    extra = tensors.keys() - {part.source for part in plan}
    if extra:
        raise InvalidCheckpoint(f"tensor {min(extra)} is not part of this architecture")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: dict[str, list[tuple[GgufTensor, int]]] = {}
    end = 0
    for part in plan:
        begin, end = end, end + 4 * int(np.prod(part.shape))
        parts.setdefault(part.source, []).append((part, begin))
        header[part.name] = {"dtype": "F32", "shape": list(part.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % 64)  # the data starts at a cache line
    with path.open("wb") as file, progress("Converting model", end) as advance:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        start = file.tell()
        for source, wanted_parts in parts.items():
            values = _dequantised(tensors[source])
            for part, begin in wanted_parts:
                own = values if part.expert is None else values[part.expert]
                if part.num_heads:
                    own = _unpermuted(own, part.num_heads)
                if part.is_norm and norm_offset:
                    own = own - np.float32(norm_offset)
                file.seek(start + begin)
                file.write(np.ascontiguousarray(own, dtype="<f4").data)
            advance(values.nbytes)
        _flush(file)


def _checked(part: GgufTensor, tensors: dict[str, Any], num_experts: int) -> GgufTensor:
    """The part, if the file has the tensor it belongs to, in its shape."""
    if part.source not in tensors:
        raise InvalidCheckpoint(f"tensor {part.source} is missing")
    wanted = part.shape if part.expert is None else (num_experts, *part.shape)
    found = tuple(int(size) for size in reversed(tensors[part.source].shape))
    if found != wanted:
        raise InvalidCheckpoint(f"tensor {part.source} must have shape {list(wanted)}, got {list(found)}")
    return part


def _dequantised(tensor: Any) -> Float32Array:
    """Its numbers, in the shape that a Hugging Face checkpoint has them in."""
    from gguf.quants import dequantize

    try:
        values: Float32Array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"GGUF type of tensor {tensor.name}", "one that can be dequantised", tensor.tensor_type.name
        ) from error
    return values.reshape(tuple(int(size) for size in reversed(tensor.shape)))


def _unpermuted(rows: Float32Array, num_heads: int) -> Float32Array:
    """Rows of a query or key projection, or its bias, from pairs side by side to pairs half a head apart.

    GGUF rotates rows ``2i`` and ``2i + 1`` of a head together, Hugging Face
    rows ``i`` and ``i + D/2``.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _key(path: Path) -> str:
    digest = hashlib.sha256(f"format {FORMAT_VERSION}".encode())
    try:
        status = path.stat()
        digest.update(f" size {status.st_size} mtime_ns {status.st_mtime_ns} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; it ends with the process at the latest."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_json(path: Path, content: object) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        _flush(file)


def _flush(file: IO[Any]) -> None:
    """To the disk, so that a folder that was renamed into place has its content after a crash too."""
    file.flush()
    os.fsync(file.fileno())
