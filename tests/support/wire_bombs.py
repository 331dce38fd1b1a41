"""Messages of four megabytes that are made of as many things as fit, by name."""

M = 4 * 1024 * 1024 - 256


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, body: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def nested(*path: int, body: bytes) -> bytes:
    """Fields one inside the other."""
    for number in reversed(path):
        body = field(number, body)
    return body


def frame(spec: bytes, request_id: bytes = b"a") -> bytes:
    """A session's start command with these bytes as its spec."""
    return field(2, field(1, request_id) + field(2, spec))


#: Bytes of a GenerationSpec, and the field that a refusal names.
BOMBS: dict[str, tuple[bytes, str]] = {
    "packed ids": (nested(1, 2, 1, body=b"\x01" * M), "prompt.tokens.ids"),
    "ids one by one": (nested(1, 2, body=b"\x08\x01" * (M // 2)), "prompt.tokens.ids"),
    "empty messages": (nested(1, 3, body=b"\x0a\x00" * (M // 2)), "prompt.chat.messages"),
    "small messages": (nested(1, 3, body=b"\x0a\x06\x0a\x01u\x12\x01h" * (M // 8)), "prompt.chat.messages"),
    "stop strings": (nested(2, body=b"\x52\x00" * (M // 2)), "sampling.stop_strings"),
    "stop ids": (nested(2, 9, body=b"\x01" * M), "sampling.stop_token_ids"),
    "biases": (nested(2, body=b"\x82\x01\x00" * (M // 3)), "sampling.logit_bias"),
    "banned sequences": (nested(2, body=b"\xaa\x01\x00" * (M // 3)), "sampling.banned_sequences"),
    "bad words": (nested(2, body=b"\xb2\x01\x00" * (M // 3)), "sampling.bad_words"),
    "choices": (nested(10, 4, body=b"\x0a\x00" * (M // 2)), "grammar.choice.options"),
    "unknown fields": (b"\xf8\x07\x01" * (M // 3), "frame"),
    "a prompt many times": (b"\x0a\x00" * (M // 2), "frame"),
}
