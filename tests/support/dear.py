"""Calls that are as dear as a caller can make them, by kind: the dearest legal and the cheapest illegal.

``python -m tests.support.dear ADDRESS`` makes them: it reads names from its standard input, makes
the named call over and over from several places until the next line, and then says what came of it.
"""

import asyncio
import collections
import json
import os
import sys
from dataclasses import dataclass

import grpc
import grpc.aio

from tests.support.wire_bombs import BOMBS, field
from tests.support.wire_bombs import frame as bomb_frame
from vorrang.v1 import control_pb2 as pb
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

_GENERATION, _CONTROL = "/vorrang.v1.GenerationService/", "/vorrang.v1.ControlService/"
GENERATE, TOKENIZE, DETOKENIZE = (_GENERATION + name for name in ("Generate", "Tokenize", "Detokenize"))
SESSION = _GENERATION + "Session"
#: Calls at a time.
NUM_CALLERS = 4
LEVEL = 100
MANY = 3_900_000
#: Tokens that a prompt of 8,192 may have, and bytes that it may have by its bound.
LEGAL_TOKENS, LEGAL_BYTES = 8000, 8192 * 81


@dataclass(frozen=True)
class Dear:
    """A call.

    Attributes:
        kind: what it makes dear.
        what: in words.
        method: of the call.
        raw: its message.
        is_stream: whether its answers are a stream, which is not read.
        codes: how it may end.
    """

    kind: str
    what: str
    method: str
    raw: bytes
    is_stream: bool = False
    codes: tuple[str, ...] = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "ABORTED")


def _spec(text: str = "", **sampling: object) -> types.GenerationSpec:
    values = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True} | sampling
    spec = types.GenerationSpec(sampling=types.SamplingParams(**values), priority=types.Priority(level=LEVEL))
    spec.prompt.text = text
    return spec


def _generate(spec: types.GenerationSpec) -> bytes:
    return gen.GenerateRequest(spec=spec).SerializeToString()


def _chat(contents: list[str], tools: str = "") -> types.GenerationSpec:
    spec = _spec()
    spec.prompt.chat.messages.extend(types.ChatMessage(role="user", content=text) for text in contents)
    spec.prompt.chat.tools_json = tools
    return spec


def _tokenize(text: str) -> bytes:
    return gen.TokenizeRequest(prompt=types.Prompt(text=text)).SerializeToString()


def _session(spec: bytes) -> bytes:
    return bomb_frame(spec)


def cases() -> dict[str, Dear]:
    """Every call by name."""
    legal = ("OK", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED")
    either = (*legal, "INVALID_ARGUMENT")
    texts = {
        "digits": ("`1` x 3.9 M", "1" * MANY),
        "letters": ("one word of 1 M letters", "a" * 1_000_000),
        "spaces": ("blanks, 3.9 MB", " " * MANY),
        "emoji": ("families of emoji, 3.9 MB", "👩\u200d👩\u200d👧" * (MANY // 18)),
        "blanks": ("unusual blanks, 3.9 MB", "\u2003\u00a0" * (MANY // 5)),
        "digits within the bound": ("`1` x 663 k", "1" * LEGAL_BYTES),
        "blanks within the bound": ("blanks and letters, 663 kB", ("\u2003x" * (LEGAL_BYTES // 4))),
    }
    words = ("The quick brown fox jumps over the lazy dog. " * (LEGAL_TOKENS // 10))[:LEGAL_BYTES]
    found = {
        f"generate {name}": Dear("tokenising", what, GENERATE, _generate(_spec(text)))
        for name, (what, text) in texts.items()
    }
    found |= {
        f"tokenize {name}": Dear("tokenising", f"{what}, `Tokenize`", TOKENIZE, _tokenize(text))
        for name, (what, text) in texts.items()
    }
    found |= {
        "tokenize words": Dear(
            "tokenising", "8,000 tokens of prose, `Tokenize`", TOKENIZE, _tokenize(words), codes=legal
        ),
        "tokenize long words": Dear(
            "tokenising",
            "the longest legal: 400 kB of long tokens",
            TOKENIZE,
            _tokenize((" " * 63 + "x") * 3900),
            codes=either,
        ),
        "session digits": Dear(
            "tokenising",
            "`1` x 3.9 M, in a session",
            SESSION,
            _session(_spec("1" * MANY).SerializeToString()),
            codes=either,
        ),
        "chat messages": Dear(
            "chat templates",
            "1,600 messages",
            TOKENIZE,
            gen.TokenizeRequest(prompt=_chat(["x"] * 1600).prompt).SerializeToString(),
            codes=either,
        ),
        "chat most messages": Dear(
            "chat templates", "4,096 messages", GENERATE, _generate(_chat(["x"] * 4096)), codes=either
        ),
        "chat too many messages": Dear(
            "chat templates", "4,097 messages", GENERATE, _generate(_chat(["x"] * 4097))
        ),
        "chat special tokens": Dear(
            "chat templates",
            "`<|im_start|>` x 50 k in a message",
            GENERATE,
            _generate(_chat(["<|im_start|>" * 50_000])),
        ),
        "chat angles": Dear(
            "chat templates", "`<` x 600 k in a message", GENERATE, _generate(_chat(["<" * 600_000]))
        ),
        "tools nested": Dear(
            "chat templates", "tools of 600 k `[`", GENERATE, _generate(_chat(["x"], "[" * 600_000))
        ),
        "tools many": Dear(
            "chat templates",
            "200 k empty tools",
            GENERATE,
            _generate(_chat(["x"], "[" + "{}," * 200_000 + "{}]")),
            codes=either,
        ),
        "detokenize": Dear(
            "detokenising",
            "8,192 ids",
            DETOKENIZE,
            gen.DetokenizeRequest(token_ids=[198] * 8192).SerializeToString(),
            codes=legal,
        ),
        "detokenize bytes": Dear(
            "detokenising",
            "1 M ids",
            DETOKENIZE,
            gen.DetokenizeRequest(token_ids=[198] * 1_000_000).SerializeToString(),
        ),
        "bad words": Dear(
            "bad words", "256 of 256 bytes", GENERATE, _generate(_spec("x", bad_words=["1" * 256] * 256))
        ),
        "stop strings": Dear(
            "stop strings",
            "16 of 256 bytes that the output goes along with",
            GENERATE,
            _generate(
                _spec(
                    "x",
                    max_tokens=40,
                    stop_strings=["a" * 255 + chr(98 + i) for i in range(16)],
                    logit_bias=[types.LogitBias(token_id=81, bias=100)],
                )
            ),
            codes=legal,
        ),
        "logprobs": Dear(
            "log probabilities",
            "20 a token, 16 outputs",
            GENERATE,
            _generate(_spec("x", max_tokens=16, temperature=1.0, logprobs=20)),
            codes=legal,
        ),
        "prompt logprobs": Dear(
            "log probabilities",
            "20 for each of 2,000 tokens of a prompt",
            GENERATE,
            _generate(_spec("a " * 2000, prompt_logprobs=20)),
            codes=legal,
        ),
        "listing": Dear(
            "operators' views",
            "`ListRequests`, 1,000 a page",
            _CONTROL + "ListRequests",
            pb.ListRequestsRequest(page_size=1000).SerializeToString(),
            codes=legal,
        ),
        "explain": Dear(
            "operators' views",
            "`ExplainRequest` of the innocent",
            _CONTROL + "ExplainRequest",
            pb.ExplainRequestRequest(id="innocent").SerializeToString(),
            codes=(*legal, "NOT_FOUND"),
        ),
        "watch": Dear(
            "operators' views",
            "watchers that do not read",
            _CONTROL + "WatchDecisions",
            pb.WatchDecisionsRequest(num_past_steps=64, include_happenings=True).SerializeToString(),
            is_stream=True,
            codes=legal,
        ),
    }
    outputs = gen.GenerateRequest.FromString(found["logprobs"].raw)
    outputs.spec.num_outputs = 16
    found["logprobs"] = Dear(
        "log probabilities", "20 a token, 16 outputs", GENERATE, outputs.SerializeToString(), codes=legal
    )
    found |= {
        f"bomb {name}": Dear(
            "parsing",
            f"4 MB of {name}",
            SESSION if index % 2 else GENERATE,
            bomb_frame(raw) if index % 2 else field(1, raw),
            codes=either,
        )
        for index, (name, (raw, _)) in enumerate(BOMBS.items())
    }
    return found | grammar_cases()


def grammar_cases() -> dict[str, Dear]:
    """Grammars that are dear to compile, or to follow."""
    nested: dict[str, object] = {"type": "string"}
    for _ in range(450):
        nested = {"type": "array", "items": nested}
    grammars = {
        "nested stars": types.Grammar(regex="(" * 20 + "a" + "*)*" * 20),
        "nested arrays": types.Grammar(json_schema=json.dumps(nested)),
        "counted regex": types.Grammar(regex="(a{1,900}b{1,900}){1,900}"),
        "most choices": types.Grammar(choice=types.Choice(options=[f"{i:060d}" for i in range(1024)])),
        "no schema": types.Grammar(json_schema="[" * 60_000),
    }
    found = {}
    for name, grammar in grammars.items():
        spec = _spec("x", max_tokens=100)
        spec.grammar.CopyFrom(grammar)
        codes = ("OK", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "ABORTED", "UNAVAILABLE", "CANCELLED")
        found[f"grammar {name}"] = Dear("grammars", name, GENERATE, _generate(spec), codes=codes)
    return found


async def _call(channel: grpc.aio.Channel, dear: Dear) -> str:
    try:
        if dear.method == SESSION:
            call = channel.stream_stream(SESSION)()
            await call.write(gen.SessionRequest(open=gen.OpenCommand()).SerializeToString())
            await call.read()
            await call.write(dear.raw)
            answer = gen.SessionResponse.FromString(await call.read())
            call.cancel()
            refusal = answer.failed if answer.HasField("failed") else answer.command_rejected
            return grpc.StatusCode.INVALID_ARGUMENT.name if refusal.status.code == 3 else "OK"
        if dear.is_stream:
            call = channel.unary_stream(dear.method)(dear.raw)
            await call.read()
            await asyncio.sleep(0.3)
            call.cancel()
            return "OK"
        await channel.unary_unary(dear.method)(dear.raw)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def _serve(address: str) -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    known = cases()
    options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(NUM_CALLERS)]
    print("ready", flush=True)
    while name := (await lines.readline()).decode().strip():
        codes: collections.Counter[str] = collections.Counter()
        stopped = asyncio.Event()

        async def caller(channel: grpc.aio.Channel, dear: Dear) -> None:
            while not stopped.is_set():  # noqa: B023 - ends before the next one
                codes["begun"] += 1  # noqa: B023
                codes[await _call(channel, dear)] += 1  # noqa: B023

        tasks = [asyncio.create_task(caller(channel, known[name])) for channel in channels]
        await lines.readline()
        stopped.set()
        _, late = await asyncio.wait(tasks, timeout=4)
        for task in late:
            task.cancel()
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    os.nice(15)  # what making the calls costs is not what is measured
    asyncio.run(_serve(sys.argv[1]))
