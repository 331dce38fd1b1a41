"""Write docs/reference/protocol.md from the protos and their comments, or check that it is current.

Usage: ``python tools/protocol_reference.py [--check]``
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from tools.protos import ROOT, protoc

TARGET = ROOT / "docs/reference/protocol.md"
PACKAGE = ".vorrang.v1."
#: Numbers of the fields of descriptors, by which comments are found.
_MESSAGE, _ENUM, _SERVICE, _INNER, _INNER_ENUM = 4, 5, 6, 3, 4
_SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}
HEAD = """\
# Protocol reference

<!-- Written by tools/protocol_reference.py from protos/vorrang/v1; `make proto` writes it again. -->

Every service, message and enum of `vorrang.v1`, with the comments of the protos. How they play together is \
in [PROTOCOL.md](../PROTOCOL.md), what each error means in [TROUBLESHOOTING.md](../TROUBLESHOOTING.md).
"""

Where = tuple[int, ...]


class Reference:
    """One file's comments, and what becomes of them."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): location.leading_comments.strip()
            for location in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        """The file as Markdown."""
        yield f"## {Path(self._file.name).name}\n"
        yield f"{self._said((12,)) or self._said((2,))}\n"
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (_SERVICE, index))
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (_MESSAGE, index), message.name)
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (_ENUM, index), enum.name)

    def _service(self, service: ServiceDescriptorProto, path: Where) -> Iterator[str]:
        yield f"### {service.name}\n"
        yield f"{self._said(path)}\n"
        yield "| call | request | response | what |\n|---|---|---|---|"
        for index, method in enumerate(service.method):
            request = ("stream of " if method.client_streaming else "") + linked(method.input_type)
            response = ("stream of " if method.server_streaming else "") + linked(method.output_type)
            yield f"| `{method.name}` | {request} | {response} | {self._cell((*path, 2, index))} |"
        yield ""

    def _message(self, message: DescriptorProto, path: Where, name: str) -> Iterator[str]:
        yield f"### {name}\n"
        yield f"{self._said(path)}\n"
        if message.field:
            yield "| no. | field | type | what |\n|---|---|---|---|"
        told: set[int] = set()
        for index, field in enumerate(message.field):
            group = field.oneof_index if field.HasField("oneof_index") and not field.proto3_optional else None
            if group is not None and group not in told:
                told.add(group)
                oneof = message.oneof_decl[group].name
                yield f"| | *one of* `{oneof}` | | {self._cell((*path, 8, group))} |"
            mark = "" if group is None else "· "
            said = self._cell((*path, 2, index))
            yield f"| {field.number} | {mark}`{field.name}` | {type_of(field)} | {said} |"
        if message.field:
            yield ""
        for index, inner in enumerate(message.nested_type):
            yield from self._message(inner, (*path, _INNER, index), f"{name}.{inner.name}")
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _INNER_ENUM, index), f"{name}.{enum.name}")

    def _enum(self, enum: EnumDescriptorProto, path: Where, name: str) -> Iterator[str]:
        yield f"### {name}\n"
        yield f"{self._said(path)}\n"
        yield "| no. | value | what |\n|---|---|---|"
        for index, value in enumerate(enum.value):
            yield f"| {value.number} | `{value.name}` | {self._cell((*path, 2, index))} |"
        yield ""

    def _said(self, path: Where) -> str:
        return " ".join(self._comments.get(path, "").split())

    def _cell(self, path: Where) -> str:
        return self._said(path).replace("|", "\\|")


def type_of(field: FieldDescriptorProto) -> str:
    """As it is written, types of ours linked."""
    label = FieldDescriptorProto.Label
    before = "repeated " if field.label == label.Value("LABEL_REPEATED") else ""
    before = "optional " if field.proto3_optional else before
    return before + (linked(field.type_name) if field.type_name else _SCALARS[field.type])


def linked(name: str) -> str:
    """Name of a type, with a link if it is ours."""
    if name.startswith(PACKAGE):
        short = name.removeprefix(PACKAGE)
        return f"[{short}](#{anchor(short)})"
    return name.removeprefix(".")


def anchor(heading: str) -> str:
    """Of a heading, as GitHub makes it."""
    return "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "-_")


def reference() -> str:
    """The page."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors.binpb"
        protoc("--include_source_info", f"--descriptor_set_out={target}")
        files = FileDescriptorSet.FromString(target.read_bytes()).file
    order = ("generation", "types", "errors", "control")
    names = [Path(file.name).stem for file in files]
    by_name: dict[str, Any] = dict(zip(names, files, strict=True))
    sorted_names = sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))
    parts = [HEAD, *(line for name in sorted_names for line in Reference(by_name[name]).lines())]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    """Write, or compare."""
    text = reference()
    if sys.argv[1:] != ["--check"]:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(text)
        return 0
    if TARGET.exists() and TARGET.read_text() == text:
        return 0
    print(f"{TARGET.relative_to(ROOT)} is not what the protos say; run `make proto`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
