"""Damaged model files: whatever is wrong with one, its loader says so at once and in one line."""

import json
import random
import resource
import shutil
import struct
import time

import pytest

from engine.models.adapters import load_adapter
from engine.models.checkpoint import MappedFile
from engine.models.config import DecoderConfig
from engine.models.errors import InvalidCheckpoint, ModelLoadError
from engine.models.gguf import convert
from engine.models.loader import load_weights
from engine.models.registry import find_model
from engine.models.tokenizer import HfTokenizer
from tests.support.adapters import write_adapter
from tests.support.models import tiny_llama
from tests.unit.test_model_gguf import write_gguf

#: Seconds and bytes that an error may take; those of a file that is believed have no end.
SECONDS_MAX, BYTES_MAX = 5.0, 300 * 2**20
DEEP = 50_000
STRING, ARRAY, UINT32 = 8, 9, 4


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(*fields, tensors=(), version=3, num_tensors=None, num_fields=None):
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(fields) + b"".join(tensors)


def field(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def array(kind, length, items=b""):
    return struct.pack("<IQ", kind, length) + items


def tensor(name=b"output.weight", shape=(32,), kind=0, offset=0):
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


GGUF_FILES = {
    "empty": b"",
    "four bytes": b"GGUF",
    "another magic": b"GGML" + bytes(100),
    "version 0": header(version=0),
    "version 77": header(version=77),
    "fields 2^63": header(num_fields=2**63),
    "fields 2^63 of zeros": header(num_fields=2**16) + bytes(2**20),
    "tensors 2^63": header(num_tensors=2**63),
    "array of 2^40 numbers": header(field(b"a", ARRAY, array(UINT32, 2**40))),
    "array of 2^40 strings": header(field(b"a", ARRAY, array(STRING, 2**40))) + bytes(2**20),
    "arrays of many numbers": header(
        *[field(b"%d" % i, ARRAY, array(0, 2**20, bytes(2**20))) for i in range(9)]
    ),
    "nested arrays": header(field(b"a", ARRAY, array(ARRAY, 1) * DEEP)),
    "array of arrays of none": header(field(b"a", ARRAY, array(ARRAY, 2**20, array(0, 0) * 2**16))),
    "array of an unknown kind": header(field(b"a", ARRAY, array(77, 1))),
    "string of 2^60": header(field(b"a", STRING, struct.pack("<Q", 2**60))),
    "string of 2^64 - 1": header(field(b"a", STRING, struct.pack("<Q", 2**64 - 1))),
    "name of 2^60": header(struct.pack("<Q", 2**60), num_fields=1),
    "name that is no UTF-8": header(field(b"\xff\xfe", UINT32, bytes(4))),
    "unknown kind": header(field(b"a", 77, bytes(8))),
    "the same field twice": header(field(b"a", UINT32, bytes(4)), field(b"a", UINT32, bytes(4))),
    "alignment 0": header(field(b"general.alignment", UINT32, bytes(4))),
    "alignment 3": header(field(b"general.alignment", UINT32, b"\3\0\0\0")),
    "alignment 2^31": header(field(b"general.alignment", UINT32, b"\0\0\0\x80")),
    "alignment that is text": header(field(b"general.alignment", STRING, text(b"32"))),
    "tensor beyond the file": header(tensors=[tensor(offset=2**40)]) + bytes(4096),
    "tensor at 2^64": header(tensors=[tensor(offset=2**64 - 32)]) + bytes(4096),
    "tensor half beyond": header(tensors=[tensor(shape=(4096,))]) + bytes(4096),
    "sizes that overflow": header(tensors=[tensor(shape=(2**32, 2**32))]) + bytes(4096),
    "sizes that overflow to few": header(tensors=[tensor(shape=(2**63, 2))]) + bytes(4096),
    "no size": header(tensors=[tensor(shape=(0,))]) + bytes(4096),
    "no dimensions": header(tensors=[tensor(shape=())]) + bytes(4096),
    "2^31 dimensions": header(tensors=[text(b"a") + struct.pack("<I", 2**31)]) + bytes(4096),
    "unknown type": header(tensors=[tensor(kind=999)]) + bytes(4096),
    "half a block": header(tensors=[tensor(shape=(33,), kind=8)]) + bytes(4096),
    "the same tensor twice": header(tensors=[tensor(), tensor()]) + bytes(4096),
}


@pytest.fixture
def frugal():
    """The test takes no more time and memory than an error may."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < SECONDS_MAX
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES_MAX


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    reference = tiny_llama(folder / "whole", tie_word_embeddings=False)
    write_adapter(folder / "adapter", reference)
    write_gguf(folder / "tiny.gguf", reference)
    return folder


@pytest.fixture(scope="module")
def config(model):
    return DecoderConfig.from_folder(model / "whole")


@pytest.fixture
def folder(model, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(model, tmp_path / "model")


def one_line(raised):
    assert "\n" not in str(raised.value)
    assert 10 < len(str(raised.value)) < 2500


def refusal(load):
    """What a loader says of a file that it does not take; None where it does."""
    try:
        load()
    except ModelLoadError as error:
        return error
    return None


@pytest.mark.parametrize("damage", GGUF_FILES)
def test_a_damaged_gguf_header_is_one_line(damage, tmp_path, frugal):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(GGUF_FILES[damage])

    with pytest.raises(InvalidCheckpoint, match=r"damaged\.gguf") as raised:
        find_model(str(path), cache_dir=tmp_path / "cache")

    one_line(raised)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llama.block_count", 2**31 - 1),
        ("llama.block_count", "two"),
        ("llama.embedding_length", "wide"),
        ("llama.attention.head_count", 0),
        ("llama.context_length", 2**32 - 1),
        ("llama.rope.freq_base", "far"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.expert_count", 2**31 - 1),
        ("tokenizer.ggml.tokens", "many"),
        ("tokenizer.ggml.tokens", [1, 2, 3]),
        ("tokenizer.ggml.bos_token_id", "first"),
        ("tokenizer.ggml.merges", [1, 2]),
        ("tokenizer.chat_template", 7),
    ],
)
def test_metadata_of_another_kind_or_size_are_one_line(name, value, model, tmp_path, frugal):
    reference = tiny_llama(tmp_path / "reference")
    write_gguf(tmp_path / "a.gguf", reference, edit_metadata=lambda metadata: metadata.update({name: value}))
    (tmp_path / "out").mkdir()

    with pytest.raises(ModelLoadError) as raised:
        convert(tmp_path / "a.gguf", tmp_path / "out")

    one_line(raised)


def safetensors(entries, data=bytes(64)):
    encoded = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entry(begin=0, end=64, shape=(16,), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SAFETENSORS_FILES = {
    "empty": b"",
    "header of 2^60": struct.pack("<Q", 2**60) + bytes(100),
    "header of 2^64 - 1": struct.pack("<Q", 2**64 - 1) + bytes(100),
    "nested deep": safetensors(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "nested metadata": safetensors(b'{"__metadata__":' + b'{"a":' * DEEP + b"1" + b"}" * (DEEP + 1)),
    "overlap": safetensors({"a": entry(), "b": entry()}),
    "gap": safetensors({"a": entry(4, 64, (15,))}),
    "negative": safetensors({"a": entry(-64, 0)}),
    "backwards": safetensors({"a": entry(64, 0)}),
    "beyond the file": safetensors({"a": entry(0, 2**40, (2**38,))}),
    "sizes that overflow": safetensors({"a": entry(0, 64, (2**62, 2**62))}),
    "another shape": safetensors({"a": entry(0, 64, (15,))}),
    "unknown type": safetensors({"a": entry(dtype="F31")}),
    "a list": safetensors([1, 2]),
    "no entry": safetensors({"a": 7}),
    "huge numbers": safetensors(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,64]}}'
    ),
}


@pytest.mark.parametrize("damage", SAFETENSORS_FILES)
def test_a_damaged_safetensors_file_is_one_line(damage, folder, config, frugal):
    path = folder / "whole" / "model.safetensors"
    path.write_bytes(SAFETENSORS_FILES[damage])
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(SAFETENSORS_FILES[damage])

    with pytest.raises(InvalidCheckpoint) as raised:
        MappedFile(path)
    one_line(raised)
    with pytest.raises(ModelLoadError, match="some-adapter") as raised:
        load_adapter("some-adapter", folder / "adapter", config)
    one_line(raised)


JSON_FILES = {
    "nested deep": b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "a number of 5000 digits": b'{"architectures":["LlamaForCausalLM"],"hidden_size":' + b"9" * 5000 + b"}",
    "no UTF-8": b'{"\xff": 1}',
    "half": b'{"architectures": ["Llama',
    "a list": b"[]",
    "nothing": b"",
}
LOADERS = {
    "config.json": lambda folder, config: DecoderConfig.from_folder(folder / "whole"),
    "generation_config.json": lambda folder, config: DecoderConfig.from_folder(folder / "whole"),
    "tokenizer.json": lambda folder, config: HfTokenizer(folder / "whole").warm_up(),
    "tokenizer_config.json": lambda folder, config: HfTokenizer(folder / "whole").warm_up(),
    "model.safetensors": lambda folder, config: load_weights(folder / "whole", config, "auto"),
    "adapter_config.json": lambda folder, config: load_adapter("a", folder / "adapter", config),
    "adapter_model.safetensors": lambda folder, config: load_adapter("a", folder / "adapter", config),
    "tiny.gguf": lambda folder, config: convert(folder / "tiny.gguf", fresh(folder / "converted")),
}


def fresh(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def file_of(folder, name):
    places = [folder / "whole" / name, folder / "adapter" / name, folder / name]
    return next((place for place in places if place.exists()), places[0])


@pytest.mark.parametrize("damage", JSON_FILES)
@pytest.mark.parametrize("name", [name for name in LOADERS if name.endswith("json")])
def test_a_damaged_json_file_is_one_line(name, damage, folder, config, frugal):
    file_of(folder, name).write_bytes(JSON_FILES[damage])

    with pytest.raises(ModelLoadError) as raised:
        LOADERS[name](folder, config)

    one_line(raised)


@pytest.mark.parametrize("name", [name for name in LOADERS if name.endswith("json")])
def test_a_json_file_beyond_all_sizes_is_not_read(name, folder, config, frugal):
    with file_of(folder, name).open("wb") as file:
        file.truncate(2**33)  # takes no room on the disk

    with pytest.raises(ModelLoadError, match="bytes") as raised:
        LOADERS[name](folder, config)

    one_line(raised)


@pytest.mark.parametrize("value", [10**30, -(10**30), 10**400, "many", [[]], 1e308, -1, True, 2**31 - 1])
@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "architectures", "hidden_act", "layer_types", "rope_scaling", "rms_norm_eps"],
)
def test_a_value_of_another_kind_or_size_is_one_line(field, value, model, frugal):
    content = json.loads((model / "whole" / "config.json").read_bytes())

    found = refusal(lambda: DecoderConfig.from_dict(content | {field: value}))

    if found is None:
        assert field == "rms_norm_eps", "a number of any size above zero is one that can be added"
        assert value > 0


HUGE = [0, -1, 1, 2**31, 2**63, 2**64 - 1, 10**30, 10**400, 1e308, 1e-308]


def damaged(content, rng):
    """Bytes with something wrong: flipped, cut off, left out, or numbers replaced."""
    data = bytearray(content)
    kind = rng.randrange(5)
    if kind == 0:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:  # in the first part, where binary files have their header
        at = rng.randrange(min(len(data), 4096))
        data[at : at + 8] = struct.pack("<Q", rng.choice(HUGE[:6]) % 2**64)
    elif kind == 3:
        at = rng.randrange(len(data))
        del data[at : at + rng.randint(1, 16)]
    else:
        at = rng.randrange(len(data))
        while at < len(data) and not chr(data[at]).isdigit():
            at += 1
        end = at
        while end < len(data) and chr(data[end]).isdigit():
            end += 1
        data[at:end] = str(rng.choice(HUGE)).encode()
    return bytes(data)


def fuzz(name, folder, config, seed, cases):
    rng, path = random.Random(f"{name} {seed}"), file_of(folder, name)
    whole, refused = path.read_bytes(), 0
    for case in range(cases):
        path.write_bytes(damaged(whole, rng))
        began = time.process_time()
        found = refusal(lambda: LOADERS[name](folder, config))
        refused += found is not None
        assert "\n" not in str(found), (case, found)
        assert time.process_time() - began < SECONDS_MAX, case
    path.write_bytes(whole)
    LOADERS[name](folder, config)
    assert refused, "nothing was found wrong"


@pytest.mark.parametrize("name", LOADERS)
def test_whatever_is_changed_in_a_file_only_a_typed_error_comes_of_it(name, folder, config):
    fuzz(name, folder, config, seed=1, cases=25)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", LOADERS)
def test_whatever_is_changed_in_a_file_only_a_typed_error_comes_of_it_many_times(name, seed, folder, config):
    fuzz(name, folder, config, seed, cases=200)
