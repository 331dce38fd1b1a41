"""The header of a GGUF file, walked once in bounded time and memory before a library reads it.

The ``gguf`` package believes every count and length it finds: a damaged file would cost it
all memory, or no end of time. Here each is compared with what the file can hold, and nothing
is copied but the names. Source of the format: ggml's ``docs/gguf.md``.
"""

import math
import mmap
import struct
from pathlib import Path

from engine.models.errors import InvalidCheckpoint

#: Of everything before the tensors; the largest vocabularies need about 30 MB.
HEADER_BYTES_MAX = 2**28
#: Of all arrays together: the library makes objects of each. The largest vocabularies have 1.5 million.
ARRAY_ITEMS_MAX = 2**22
STRING_BYTES_MAX = 2**24
FIELDS_MAX = 2**16
TENSORS_MAX = 2**18
DIMENSIONS_MAX = 4

_ALIGNMENT_MAX = 2**20
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_VERSIONS = (2, 3)


def check_header(path: Path) -> None:
    """Walk the header; tensors must lie in the file.

    Raises:
        InvalidCheckpoint: a count, a length, a type or a place is none that the file can have.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(path, data).check()
    except (OSError, ValueError, struct.error) as error:  # empty, or it ends in the middle of something
        raise InvalidCheckpoint(f"{path} is no readable GGUF file: {error}") from error


class _Walk:
    """A way through one file, from its first byte on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size = path, data, len(data)
        self._at, self._items, self._order = 0, 0, "<"
        self._alignment = 32

    def check(self) -> None:
        if self._data[:4] != b"GGUF":
            raise self._broken("its beginning", "GGUF", self._data[:4])
        self._at = 4
        if self._read("I") & 0xFFFF == 0:  # written by a machine of the other byte order
            self._order = ">"
        self._at = 4
        version = self._read("I")
        if version not in _VERSIONS:
            raise self._broken("version", "2 or 3", version)
        tensors, fields = self._count("tensors", TENSORS_MAX), self._count("metadata", FIELDS_MAX)
        self._fields(fields)
        ends = self._tensors(tensors)
        start = self._at + -self._at % self._alignment
        for name, end in ends.items():
            if start + end > self._size:
                rule = f"within the file's {self._size} bytes"
                raise self._broken(f"end of tensor {name}", rule, start + end)

    def _fields(self, count: int) -> None:
        names: set[str] = set()
        for _ in range(count):
            name = self._name("metadata")
            if name in names:
                raise self._broken("names of metadata", "all different", name)
            names.add(name)
            kind = self._read("I")
            if name == "general.alignment":
                if kind != _UINT32:
                    raise self._broken(name, "a 32-bit number", f"type {kind}")
                self._alignment = int(self._read("I", peek=True))
                if not 0 < self._alignment <= _ALIGNMENT_MAX or self._alignment & (self._alignment - 1):
                    raise self._broken(name, f"a power of two up to {_ALIGNMENT_MAX}", self._alignment)
            self._value(name, kind)

    def _value(self, name: str, kind: int) -> None:
        if kind == _STRING:
            self._string(name)
        elif kind == _ARRAY:
            self._array(name)
        elif kind in _SIZES:
            self._skip(name, _SIZES[kind])
        else:
            raise self._broken(f"type of {name}", "one that GGUF knows", kind)

    def _array(self, name: str) -> None:
        kind, length = self._read("I"), self._read("Q")
        self._items += length
        if self._items > ARRAY_ITEMS_MAX:
            raise self._broken(f"items of {name}", f"at most {ARRAY_ITEMS_MAX}, with those before", length)
        if kind in _SIZES:
            self._skip(name, length * _SIZES[kind])
        elif kind == _STRING:
            for _ in range(length):
                self._string(name)
        else:
            raise self._broken(f"items of {name}", "numbers or strings", f"type {kind}")

    def _tensors(self, count: int) -> dict[str, int]:
        """Where each ends, counted from where the tensors begin."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        ends: dict[str, int] = {}
        for _ in range(count):
            name = self._name("a tensor")
            if name in ends:
                raise self._broken("names of tensors", "all different", name)
            dimensions = self._read("I")
            if not 1 <= dimensions <= DIMENSIONS_MAX:
                raise self._broken(f"dimensions of tensor {name}", f"1 to {DIMENSIONS_MAX}", dimensions)
            shape = [self._read("Q") for _ in range(dimensions)]
            kind, offset = self._read("I"), self._read("Q")
            if kind not in list(GGMLQuantizationType):
                raise self._broken(f"type of tensor {name}", "one that GGUF knows", kind)
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if not all(shape) or shape[0] % block:
                rule = f"above zero, the first a multiple of {block}"
                raise self._broken(f"sizes of tensor {name}", rule, shape)
            if offset % self._alignment:
                raise self._broken(f"offset of tensor {name}", f"a multiple of {self._alignment}", offset)
            ends[name] = offset + math.prod(shape) // block * size
        return ends

    def _read(self, kind: str, *, peek: bool = False) -> int:
        (value,) = struct.unpack_from(self._order + kind, self._data, self._at)
        self._at += 0 if peek else struct.calcsize(self._order + kind)
        return int(value)

    def _count(self, what: str, most: int) -> int:
        count = self._read("Q")
        if count > most:
            raise self._broken(f"number of {what}", f"at most {most}", count)
        return count

    def _name(self, what: str) -> str:
        begin = self._at + 8
        self._string(f"the name of {what}", most=2**16)
        return self._data[begin : self._at].decode()

    def _string(self, name: str, most: int = STRING_BYTES_MAX) -> None:
        length = self._read("Q")
        if length > most:
            raise self._broken(f"length of {name}", f"at most {most} bytes", length)
        self._skip(name, length)

    def _skip(self, name: str, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > min(self._size, HEADER_BYTES_MAX):
            rule = f"within the file's {self._size} bytes, and {HEADER_BYTES_MAX}"
            raise self._broken(f"end of {name}", rule, self._at)

    def _broken(self, what: str, rule: str, value: object) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self._path} is no readable GGUF file: {what} must be {rule}, got {value}")
