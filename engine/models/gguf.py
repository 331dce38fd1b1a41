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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from engine.models.errors import CacheUnusable, InvalidCheckpoint, ModelNotFound, UnsupportedModel
from engine.models.gguf_tokenizer import write_tokenizer
from engine.models.progress import progress

#: Part of the cache key; raise it whenever the content of a converted folder changes.
FORMAT_VERSION = 1

_HEADER_BYTES = 2**20

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
        CacheUnusable: ``cache_dir`` cannot be written.
    """
    folder = cache_dir / "models" / f"{path.stem}-{_key(path)}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                partial = folder.with_name(f".{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed
                partial.mkdir()
                convert(path, partial)
                partial.rename(folder)
    except OSError as error:
        raise CacheUnusable(f"cache folder {cache_dir} cannot be used: {error}") from error
    return folder


def convert(path: Path, folder: Path) -> None:
    """Write the model in the GGUF file ``path`` into ``folder``, which exists and is empty.

    Raises:
        InvalidCheckpoint: the file is damaged or lacks something.
        UnsupportedModel: another architecture, rope scaling or tokenizer.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise InvalidCheckpoint(f"{path} is no readable GGUF file") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in tensors)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    write_tokenizer(fields, folder, max_tokens=config["max_position_embeddings"])
    _write_weights(tensors, config, folder / "model.safetensors")


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """``config.json`` from the file's metadata."""
    kind = _field(fields, "general.architecture")
    if kind != "llama":
        raise UnsupportedModel("GGUF general.architecture", "llama", kind)
    if fields.get("llama.expert_count", 0):
        raise UnsupportedModel("GGUF llama.expert_count", "0", fields["llama.expert_count"])
    heads = _field(fields, "llama.attention.head_count")
    hidden = _field(fields, "llama.embedding_length")
    head_dim = fields.get("llama.attention.key_length", hidden // heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(
            "GGUF llama.rope.dimension_count",
            f"the head size {head_dim}",
            fields["llama.rope.dimension_count"],
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(fields, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": _field(fields, "llama.feed_forward_length"),
        "num_hidden_layers": _field(fields, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _field(fields, "llama.context_length"),
        "rms_norm_eps": _shortest(_field(fields, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields),
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(fields, "tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _rope_scaling(fields: dict[str, Any]) -> dict[str, Any] | None:
    kind = fields.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise UnsupportedModel("GGUF llama.rope.scaling.type", "none or linear", kind)
    return {"rope_type": "linear", "factor": _shortest(_field(fields, "llama.rope.scaling.factor"))}


def _field(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise InvalidCheckpoint(f"GGUF metadata {name} is missing")
    return fields[name]


def _shortest(value: float) -> float:
    """The decimal number a float32 was rounded from: 9.99999975e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _tensor_names(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """GGUF name, Hugging Face name, shape, and heads to unpermute (0 = none), in the order of the file.

    Query, key and value of a layer are neighbours, and so are gate and up:
    fused, they are still one piece of the file.
    """
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    vocab = (config["vocab_size"], hidden)
    yield "token_embd.weight", "model.embed_tokens.weight", vocab, 0
    parts = (
        ("attn_norm", "input_layernorm", (hidden,), 0),
        ("attn_q", "self_attn.q_proj", (q_heads * head_dim, hidden), q_heads),
        ("attn_k", "self_attn.k_proj", (kv_heads * head_dim, hidden), kv_heads),
        ("attn_v", "self_attn.v_proj", (kv_heads * head_dim, hidden), 0),
        ("attn_output", "self_attn.o_proj", (hidden, q_heads * head_dim), 0),
        ("ffn_norm", "post_attention_layernorm", (hidden,), 0),
        ("ffn_gate", "mlp.gate_proj", (intermediate, hidden), 0),
        ("ffn_up", "mlp.up_proj", (intermediate, hidden), 0),
        ("ffn_down", "mlp.down_proj", (hidden, intermediate), 0),
    )
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs, shape, heads in parts:
            yield f"blk.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight", shape, heads
    yield "output_norm.weight", "model.norm.weight", (hidden,), 0
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", vocab, 0


def _write_weights(tensors: dict[str, Any], config: dict[str, Any], path: Path) -> None:
    """Write a safetensors file, float32, tensor by tensor.

    Source of the format: the safetensors README. The library's own writer
    wants all tensors at once and chooses their order.
    """
    plan = list(_tensor_names(config))
    extra = tensors.keys() - {name for name, *_ in plan}
    if extra:
        raise InvalidCheckpoint(f"tensor {min(extra)} is not part of this architecture")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, hf_name, shape, _ in plan:
        if name not in tensors:
            raise InvalidCheckpoint(f"tensor {name} is missing")
        found = tuple(int(size) for size in reversed(tensors[name].shape))
        if found != shape:
            raise InvalidCheckpoint(f"tensor {name} must have shape {list(shape)}, got {list(found)}")
        begin, end = end, end + 4 * int(np.prod(shape))
        header[hf_name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % 64)  # the data starts at a cache line
    with path.open("wb") as file, progress("Converting model", end) as advance:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, _, shape, heads in plan:
            values = _dequantised(tensors[name], shape)
            if heads:
                values = _unpermuted(values, heads)
            file.write(np.ascontiguousarray(values, dtype="<f4").data)
            advance(values.nbytes)
        _flush(file)


def _dequantised(tensor: Any, shape: tuple[int, ...]) -> Float32Array:
    from gguf.quants import dequantize

    try:
        values: Float32Array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"GGUF type of tensor {tensor.name}", "one that can be dequantised", tensor.tensor_type.name
        ) from error
    return values.reshape(shape)


def _unpermuted(weight: Float32Array, num_heads: int) -> Float32Array:
    """Rows of a query or key projection, from pairs side by side to pairs half a head apart.

    GGUF rotates rows ``2i`` and ``2i + 1`` of a head together, Hugging Face
    rows ``i`` and ``i + D/2``.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


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
