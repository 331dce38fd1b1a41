"""Grammars without a library: the limits, the cache, the engine and the server, on the scripted model."""

import asyncio
import threading

import numpy as np
import pytest

from clients.python import InvalidRequest as RefusedByServer
from clients.python import Overloaded as QueueFullByServer
from clients.python import Unimplemented, VorrangClient
from clients.python.request import encode_spec
from engine.decisions.codec import parse, read_call, record_line
from engine.errors import InvalidRequest, QueueFull
from engine.events import Delta, Failed, Finished, Preempted
from engine.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, GrammarKind, GrammarRefused, GrammarSpec
from engine.loop import Engine
from engine.request import FinishReason, RequestId, RequestSpec
from engine.runner.child import RunnerLimits
from engine.runner.grammars.byte_compiler import ByteCompiler
from engine.runner.grammars.constraint import allowed
from engine.runner.grammars.following import Fill, Outputs
from engine.runner.grammars.host import ThreadHost
from engine.runner.grammars.limits import GrammarLimits
from engine.runner.grammars.masks import Masks
from engine.runner.grammars.utf8 import STATES, after, allowed_from
from engine.runner.process import ProcessRunner
from engine.runner.scripted import EOS_TOKEN_ID, VOCAB_SIZE, ScriptedRunner, ScriptedTokenizer
from engine.runner.sources import ScriptedSource
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.decisions import Committed, Record
from engine.scheduler.plan import StepResult
from tests.support.runners import LIMITS, FatalGrammars
from tests.support.server import running_server
from tests.support.wire import let_pass

ANSWERS = GrammarSpec(GrammarKind.CHOICE, choices=("yes", "no", "yesterday", "né"))


class SlowCompiler(ByteCompiler):
    """Compiles a grammar with "slow" in it only when it may."""

    def __init__(self):
        self.may = threading.Event()
        self.num_compiled = 0

    def compile(self, spec):
        self.num_compiled += 1
        if "slow" in spec.choices:
            assert self.may.wait(30)
        return super().compile(spec)


def choice(*answers):
    return GrammarSpec(GrammarKind.CHOICE, choices=answers)


class Followed:
    """One output under ``ANSWERS``, followed by hand."""

    def __init__(self):
        self.outputs = Outputs(ByteCompiler().compile(ANSWERS), VOCAB_SIZE)
        self.tokens = b""

    def follow(self, tokens):
        num_kept = len(self.tokens) if tokens.startswith(self.tokens) else 0
        self.tokens = tokens
        self.answer = self.outputs.answer(Fill(1, 1, num_kept, tokens[num_kept:], 1.0))
        return self.answer

    def mask(self, banned, only=()):
        params = SamplingParams(grammar=ANSWERS, allowed_token_ids=tuple(only))
        return ids_of(allowed(params, self.answer, [EOS_TOKEN_ID], banned, len(self.tokens)))


def masks_by(compiler, **more):
    return Masks(ThreadHost(lambda: compiler, VOCAB_SIZE), **more)


def ids_of(mask):
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, Delta))


@pytest.mark.parametrize(
    ("kind", "text", "choices", "field", "rule"),
    [
        (GrammarKind.REGEX, "", (), "grammar.regex", "must not be empty"),
        (GrammarKind.EBNF, "x" * (MAX_GRAMMAR_BYTES + 1), (), "grammar.ebnf", "must be at most 65536 bytes"),
        (GrammarKind.CHOICE, "", (), "grammar.choice.options", "must hold 1 to 1024 answers"),
        (GrammarKind.CHOICE, "", ("a",) * (MAX_CHOICES + 1), "grammar.choice.options", "must hold 1 to"),
        (GrammarKind.CHOICE, "", ("a", ""), "grammar.choice.options[1]", "must not be empty"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_grammar_that_is_empty_or_too_large_is_refused(kind, text, choices, field, rule):
    with pytest.raises(InvalidRequest) as refused:
        GrammarSpec(kind, text, choices)
    assert refused.value.field == field
    assert refused.value.rule.startswith(rule)


def test_an_output_is_followed_forwards_and_back():
    """vLLM 17."""
    one = Followed()
    one.follow(b"")
    assert one.mask([]) == sorted({ord("y"), ord("n")})
    one.follow(b"ye")
    assert one.mask([]) == [ord("s")]
    assert not one.follow(b"yes").is_complete
    assert one.mask([]) == [ord("t"), EOS_TOKEN_ID]
    assert one.follow(b"yesterday").is_complete
    one.follow(b"n")  # what followed was computed in vain
    assert one.mask([]) == [ord("o"), "né".encode()[1]]
    assert one.follow(b"no").is_complete
    assert one.follow(b"nx").refused_at == 1


def test_what_bans_and_allowed_ids_leave_is_seen_to():
    one = Followed()
    one.follow(b"yes")
    one.mask([EOS_TOKEN_ID])
    with pytest.raises(GrammarRefused, match="not banned at this place"):
        one.mask([EOS_TOKEN_ID, ord("t")])
    with pytest.raises(GrammarRefused, match="not banned at this place"):
        one.mask([], [ord("x")])


def test_compiled_grammars_are_shared_and_the_least_used_are_let_go():
    compiler = SlowCompiler()
    compiler.may.set()
    masks = masks_by(compiler, limits=GrammarLimits(num_idle_max=2))
    for answers in ("a", "b", "a", "c", "a", "b"):
        masks.prepare(choice(answers)).result(10)
    assert (masks.num_compiled, compiler.num_compiled) == (2, 4)


def test_as_many_wait_to_be_compiled_as_may():
    compiler = SlowCompiler()
    masks = masks_by(compiler, max_compiling=2)
    futures = [masks.prepare(choice("slow", str(number))) for number in range(3)]  # two of them at once
    with pytest.raises(QueueFull):
        masks.prepare(choice("one more"))
    compiler.may.set()
    for future in futures:
        future.result(10)
    masks.prepare(choice("one more")).result(10)


def test_utf8_is_that_of_python():
    assert len(STATES) == 8
    for number in (*range(0x20, 0x7FF, 31), *range(0x800, 0x10FFFF, 997), 0xD7FF, 0xE000, 0x10FFFF):
        if not 0xD800 <= number <= 0xDFFF:
            assert after((), chr(number).encode()) == ()
    for bad in (b"\x80", b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xf4\x90",
                b"\xf5", b"\xff", b"\xe2a"):  # fmt: skip
        assert after((), bad) is None
    half = after((), b"\xe2\x82")
    assert half
    assert allowed_from(half, [b"\xac", b"\xacx", b"x", b"", b"\xac\xac"]) == [
        True,
        True,
        False,
        False,
        False,
    ]


async def run_engine(runner, requests, *, depth=0, **config):
    engine = Engine(
        runner, ScriptedTokenizer(), SchedulerConfig(**config), check_integrity=True, pipeline_depth=depth
    )
    task = asyncio.create_task(engine.run())
    try:
        handles = [engine.submit(each) for each in requests]
        return [[event async for event in handle.events()] for handle in handles]
    finally:
        task.cancel()
        await asyncio.wait([task])


def request(name, grammar=ANSWERS, prompt=b"is it?", eos=True, **sampling):
    params = SamplingParams(**({"grammar": grammar, "max_tokens": 40} | sampling))
    return RequestSpec(
        RequestId(name), tuple(prompt), params, eos_token_ids=frozenset({EOS_TOKEN_ID} if eos else ())
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [0, 1])
async def test_answers_are_given_and_nothing_else_also_under_preemption(depth):
    long = tuple(letter * 24 for letter in "abcdef")
    requests = [
        request(f"r{index}", choice(*long) if index % 2 else ANSWERS, bytes([65 + index]) * 9, seed=index)
        for index in range(8)
    ]
    calm = await run_engine(ScriptedRunner(64, 4), requests, depth=depth)
    pressed = await run_engine(ScriptedRunner(20, 4), requests, depth=depth)

    for one, events in zip(requests, calm, strict=True):
        assert text_of(events) in one.sampling.grammar.choices
        assert events[-1].reason is FinishReason.STOP
    assert any(isinstance(event, Preempted) for events in pressed for event in events)
    assert [text_of(events) for events in pressed] == [text_of(events) for events in calm]


@pytest.mark.asyncio
async def test_without_an_end_token_it_ends_where_nothing_may_follow():
    found = await run_engine(ScriptedRunner(64, 4), [request("a", eos=False, ignore_eos=True)])
    assert text_of(found[0]) in {"no", "yesterday", "né"}
    assert found[0][-1].reason is FinishReason.STOP


@pytest.mark.asyncio
async def test_who_may_say_nothing_fails_alone():
    dead = request("dead", choice("ab"), allowed_token_ids=(ord("a"),))
    found = await run_engine(ScriptedRunner(64, 4), [dead, request("other")])
    assert isinstance(found[0][-1], Failed)
    assert isinstance(found[0][-1].error, GrammarRefused)
    assert (found[0][-1].error.field, found[0][-1].error.value) == ("grammar.choice", 1)
    assert isinstance(found[1][-1], Finished)


@pytest.mark.asyncio
async def test_a_process_compiles_beside_its_steps_and_again_after_its_death():
    runner = await ProcessRunner.start(ScriptedSource(64, 4), RunnerLimits(hang_s=20))
    try:
        await runner.prepare(ANSWERS)
        with pytest.raises(Exception, match="regex is not implemented"):
            await runner.prepare(GrammarSpec(GrammarKind.REGEX, "a"))
        wanted = await run_engine(ScriptedRunner(64, 4), [request("a")])
        assert text_of((await run_engine(runner, [request("a")]))[0]) == text_of(wanted[0])
    finally:
        await runner.close()


@pytest.mark.asyncio
async def test_a_grammar_that_kills_or_occupies_the_process_fails_or_waits_alone(tmp_path):
    runner = await ProcessRunner.start(FatalGrammars(64, 4), LIMITS)
    try:
        await runner.prepare(ANSWERS)
        with pytest.raises(GrammarRefused, match="must compile within"):
            await runner.prepare(choice("exit"))
        await runner.prepare(choice("on", "off"))
        assert runner.statistics().num_restarts == 0
        may_end = tmp_path / "may end"
        slow = asyncio.create_task(runner.prepare(choice("until", str(may_end))))
        found = await run_engine(runner, [request("a"), request("b", choice("on", "off"))])
        assert not slow.done(), "the steps waited for it"
        may_end.touch()
        await slow
        assert [text_of(events) in {"on", "off", *ANSWERS.choices} for events in found] == [True, True]
    finally:
        await runner.close()


def test_the_decision_log_says_whose_grammar_had_no_more():
    said = Committed(3, StepResult({RequestId("a"): 5}, complete=frozenset({RequestId("a")})))
    plain = Committed(4, StepResult({RequestId("a"): 5}))
    for call in (said, plain):
        line = record_line(Record(call, 1.0, (), None))
        assert ("complete" in line) == (call is said)
        assert read_call(parse(line.encode())) == (call, 1.0)


@pytest.mark.asyncio
async def test_a_slow_compilation_holds_up_nobody_and_times_out():
    """vLLM 18: here it is not even queued."""
    runner, compiler = ScriptedRunner(64, 16), SlowCompiler()
    runner.masks = masks_by(compiler)
    settings = {"engine.grammar_wait_s_max": 3000.0}
    async with (
        running_server(settings, runner) as app,
        VorrangClient(app.address) as client,
        client.session() as session,
    ):
        slow = await session.start("is it?", choice=["slow", "slower"])
        quick = await session.start("is it?", choice=["yes", "no"])
        plain = await session.start("is it?", max_tokens=5)
        assert (await quick.result()).text in {"yes", "no"}
        assert len((await plain.result()).token_ids) == 5
        assert app.backend.engine.statistics().num_waiting == 0, "it waits without a place in the queue"
        let_pass(3000)
        with pytest.raises(QueueFullByServer, match="was not compiled within 3000 s"):
            await slow.result()
        compiler.may.set()
        again = await session.start("is it?", choice=["slow", "slower"])
        assert (await again.result()).text in {"slow", "slower"}


@pytest.mark.asyncio
@pytest.mark.timeout(30)
async def test_the_python_client_asks_for_grammars():
    async with running_server() as app, VorrangClient(app.address) as client:
        assert (await client.generate("is it?", choice=["yes", "no"])).text in {"yes", "no"}
        both = await client.generate("is it?", choice=["yes", "no"], n=2, temperature=1.0)
        assert {output.text for output in both.outputs} <= {"yes", "no"}
        with pytest.raises(Unimplemented, match=r"grammar\.regex"):
            await client.generate("is it?", regex="a")
        with pytest.raises(RefusedByServer, match=r"grammar\.choice\.options must hold"):
            await client.generate("is it?", choice=[])
        limits = app.backend.limits()
        assert (limits.max_grammar_bytes, limits.max_choices) == (MAX_GRAMMAR_BYTES, MAX_CHOICES)


def test_options_become_grammars_of_the_wire():
    assert encode_spec("x", {"json_schema": {"type": "string"}}).grammar.json_schema == '{"type": "string"}'
    assert encode_spec("x", {"json_schema": "true"}).grammar.json_schema == "true"
    assert encode_spec("x", {"ebnf": 'root ::= "a"'}).grammar.ebnf == 'root ::= "a"'
    assert not encode_spec("x", {}).HasField("grammar")
    with pytest.raises(ValueError, match="at most one of"):
        encode_spec("x", {"regex": "a", "choice": ["a"]})
    with pytest.raises(TypeError, match="several strings"):
        encode_spec("x", {"choice": "yes"})
