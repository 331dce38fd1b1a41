"""Masks beside the steps: whoever is late sits out alone, what is dear ends alone, what dies is rebuilt."""

import asyncio
import errno
import os
import queue
import resource
import signal
import socket
import threading
import time

import pytest
import structlog

from engine.errors import InternalError
from engine.events import Finished
from engine.grammar import GrammarKind, GrammarRefused, GrammarSpec
from engine.loop import Engine
from engine.runner.grammars.byte_compiler import ByteChoice, ByteCompiler, ByteMatcher
from engine.runner.grammars.compile_queue import CompileQueue
from engine.runner.grammars.forking import ForkingHost
from engine.runner.grammars.host import ThreadHost
from engine.runner.grammars.limits import GrammarLimits
from engine.runner.grammars.masks import Masks
from engine.runner.scripted import VOCAB_SIZE, ScriptedRunner, ScriptedTokenizer
from engine.scheduler.config import SchedulerConfig
from tests.support.decisions import MemoryLog
from tests.support.wire import settled
from tests.unit.test_grammars import ANSWERS, choice, request, run_engine, text_of

SLOW = choice("slow and steady", "slow")


class Gated(ByteCompiler):
    """Fills no mask of a grammar with "slow" in it, from its second token on, before it may."""

    def __init__(self):
        self.may = threading.Event()
        self.num_blocked = 0

    def compile(self, spec):
        return _Gated(spec.choices, self) if "slow" in spec.choices else super().compile(spec)


class _Gated(ByteChoice):
    def __init__(self, choices, gate):
        super().__init__(choices=tuple(each.encode() for each in choices))
        self.gate = gate

    def matcher(self):
        return _GatedMatcher(self._choices, self.gate)


class _GatedMatcher(ByteMatcher):
    def __init__(self, choices, gate):
        super().__init__(choices)
        self.gate = gate

    def fill(self, mask):
        if len(self._said) == 2:
            self.gate.num_blocked += 1
            assert self.gate.may.wait(60)
        super().fill(mask)


class Dear(ByteCompiler):
    """Picklable: compiling "compile dear", or a mask after two tokens of "mask dear", never ends."""

    def compile(self, spec):
        while "compile dear" in spec.choices:
            pass
        if "recursion" in spec.choices:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "memory" in spec.choices:
            bytearray(200 << 20)
        return _Dear(tuple(each.encode() for each in spec.choices))


class _Dear(ByteChoice):
    def matcher(self):
        return _DearMatcher(self._choices)


class _DearMatcher(ByteMatcher):
    def fill(self, mask):
        while b"mask dear" in self._choices and len(self._said) == 2:
            pass
        super().fill(mask)


@pytest.fixture
def forked():
    limits = GrammarLimits(compile_s_max=0.3, mask_s_max=0.3, bytes_max=100 << 20)
    host = ForkingHost(Dear, VOCAB_SIZE, limits)
    masks = Masks(host, limits)
    masks.host = host
    yield masks
    masks.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [0, 1])
async def test_who_waits_for_a_mask_sits_out_alone_and_says_the_same(depth):
    wanted = await run_engine(ScriptedRunner(64, 4), [request("a", SLOW), request("b")])
    gate, log = Gated(), MemoryLog()
    runner = ScriptedRunner(64, 4)
    runner.masks, runner.mask_wait_s = Masks(ThreadHost(lambda: gate, VOCAB_SIZE)), 0.01
    config = SchedulerConfig(max_running_requests=2)
    engine = Engine(
        runner, ScriptedTokenizer(), config, check_integrity=True, pipeline_depth=depth, decisions=log
    )
    task = asyncio.create_task(engine.run())
    try:
        late, other = engine.submit(request("a", SLOW)), engine.submit(request("b"))
        end_of_other = [event async for event in other.events()]
        assert isinstance(end_of_other[-1], Finished), "it did not wait for the late one"
        await settled(lambda: gate.num_blocked == 1)
        num_steps = None
        while num_steps != engine.statistics().num_steps:  # nothing is computed for it any more
            num_steps = engine.statistics().num_steps
            await asyncio.sleep(0.1)
        gate.may.set()
        events = [event async for event in late.events()]
    finally:
        gate.may.set()
        task.cancel()
        await asyncio.wait([task])
    assert [text_of(events), text_of(end_of_other)] == [text_of(each) for each in wanted]
    log.replay(engine.statistics().num_steps)
    assert sum('"sat_out"' in line for line in map(str, log.lines)) >= 1


@pytest.mark.slow
def test_what_takes_too_long_to_compile_is_stopped_and_others_are_compiled_meanwhile(forked):
    dear = [forked.prepare(choice("compile dear", str(number))) for number in range(3)]
    forked.prepare(choice("quick")).result(20)
    for future in dear:
        with pytest.raises(GrammarRefused, match=r"must compile within 0\.3 s of a processor"):
            future.result(30)
    assert forked.num_compiled == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["recursion", "memory"])
def test_what_crashes_or_takes_too_much_memory_is_refused(forked, what):
    with pytest.raises((GrammarRefused, MemoryError)):
        forked.prepare(choice(what)).result(20)
    forked.prepare(choice("quick")).result(20)


def test_a_mask_that_is_too_dear_ends_its_output_alone(forked):
    spec = choice("mask dear", "mice")
    one, other = follow(forked, "one", spec, b""), follow(forked, "other", ANSWERS, b"y")
    wait(one, other)
    one = follow(forked, "one", spec, b"ma")
    follower = follow(forked, "follower", spec, b"m")
    wait(one)
    assert isinstance(one.error, GrammarRefused)
    assert "of a processor for one output" in str(one.error)
    wait(follower)
    assert follower.answer.text, "it was rebuilt from its tokens"
    wait(follow(forked, "other", ANSWERS, b"ye"))


def test_what_is_killed_from_outside_is_rebuilt(forked):
    one = follow(forked, "one", ANSWERS, b"y")
    wait(one)
    for pid in forked.host.pids():
        os.kill(pid, signal.SIGKILL)
    again = follow(forked, "one", ANSWERS, b"yes")
    wait(again)
    assert (again.answer.may_end, again.answer.has_text) == (True, True)
    os.kill(forked.host.pid, signal.SIGKILL)
    last = follow(forked, "one", ANSWERS, b"yest")
    wait(last)
    assert last.answer.text


def test_whoever_is_given_up_gives_back_its_place(forked):
    dear = [forked.prepare(choice("compile dear", str(number))) for number in range(4)]
    for future in dear:
        future.cancel()
    deadline = time.monotonic() + 20
    while forked.host.pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not forked.host.pids()


def test_the_queue_is_fair_and_urgent_first():
    queue = CompileQueue(num_quick=2, num_slow=1, max_paused=2)
    for number in range(1, 5):
        queue.push(number, "many", 0)
    queue.push(5, "one", 10)
    queue.push(6, "many", -10)
    assert [queue.begin(), queue.begin(), queue.begin()] == [6, 5, None]
    assert queue.demote(6)
    assert queue.demote(5)
    assert queue.go_on() == 6
    assert [queue.begin(), queue.begin()] == [1, 2]
    assert queue.demote(1)
    assert not queue.demote(2), "as many are paused as may be"
    assert queue.rotate(6)
    queue.remove(6)
    assert queue.go_on() == 1
    queue.remove(1)
    assert queue.go_on() == 5


def follow(masks, name, spec, tokens):
    return masks.follow(name, spec, list(tokens))


def wait(*outputs):
    deadline = time.monotonic() + 30
    while not all(output.is_known for output in outputs):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_nothing_is_shared_between_tenants():
    assert GrammarSpec(GrammarKind.CHOICE, choices=("a",), owner="x") != choice("a")


@pytest.mark.slow
def test_no_room_for_a_process_puts_a_grammar_off_and_blames_nobody(forked, monkeypatch):
    wait(follow(forked, "one", ANSWERS, b"y"))
    num_failures = 0

    def no_pair():
        nonlocal num_failures
        num_failures += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", no_pair)
        put_off = follow(forked, "two", choice("here", "there"), b"")
        deadline = time.monotonic() + 20
        while num_failures < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert num_failures >= 2, "it was to be tried again"
        assert put_off.error is None
        assert not put_off.is_known
    wait(put_off)
    assert put_off.error is None
    assert put_off.answer.text


def test_the_process_that_forks_survives_a_want_of_descriptors(forked):
    wait(follow(forked, "one", ANSWERS, b"y"))
    pid = forked.host.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    with structlog.testing.capture_logs() as logged:
        put_off = follow(forked, "two", choice("here", "there"), b"")
        deadline = time.monotonic() + 20
        while not any(line["event"] == "grammar.start_delayed" for line in logged):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    wait(put_off)
    assert put_off.error is None
    assert put_off.answer.text
    assert forked.host.pid == pid


def test_what_is_asked_when_the_library_died_with_all_grammars_is_compiled_anew(forked):
    """Its orders are there before it has read what it loads; they were lost."""
    wait(follow(forked, "one", ANSWERS, b"y"))
    host = forked.host
    for again in range(3):
        dead = host.pid
        for grammar in host.pids():
            os.kill(grammar, signal.SIGSTOP)  # so that it does not answer before it dies, too
        os.kill(dead, signal.SIGKILL)
        output = follow(forked, "one", ANSWERS, [b"ye", b"yes", b"y"][again])
        other = forked.prepare(choice("another", str(again)))
        wait(output)
        other.result(20)
        assert host.pid != dead


@pytest.mark.slow
def test_one_that_dies_while_it_loads_is_started_again_and_given_up_if_it_always_does(forked, monkeypatch):
    wait(follow(forked, "one", ANSWERS, b"y"))
    host, num_to_kill = forked.host, 2
    spawn = host._spawn

    def spawn_and_kill():
        nonlocal num_to_kill
        spawn()
        if num_to_kill:
            num_to_kill -= 1
            os.kill(host.pid, signal.SIGKILL)

    monkeypatch.setattr(host, "_spawn", spawn_and_kill)
    os.kill(host.pid, signal.SIGKILL)
    forked.prepare(choice("who", "waits")).result(20)
    wait(follow(forked, "one", ANSWERS, b"yes"))
    num_to_kill = 99
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(InternalError):
        forked.prepare(choice("one", "more")).result(20)
    assert num_to_kill == 96
    assert not host.pids()


def test_a_grammar_that_comes_while_nothing_takes_orders_is_compiled_later(forked, monkeypatch):
    wait(follow(forked, "one", ANSWERS, b"y"))
    host, meanwhile = forked.host, queue.SimpleQueue()
    spawn = host._spawn

    def slow_spawn():
        meanwhile.put(forked.prepare(choice("come", "meanwhile")))
        spawn()

    monkeypatch.setattr(host, "_spawn", slow_spawn)
    os.kill(host.pid, signal.SIGKILL)
    meanwhile.get(timeout=20).result(20)


class NotedHost:
    """Does nothing; notes what it is asked."""

    def __init__(self):
        self.noted = []

    def __getattr__(self, name):
        return lambda *args: self.noted.append((name, args[0] if args else None))


def test_what_is_compiled_while_it_is_about_to_be_paused_goes_on():
    host, now = NotedHost(), [0.0]
    masks = Masks(host, clock=lambda: now[0])
    masks.start()
    masks.loaded(None)
    dear = [masks.prepare(choice("dear", str(number))) for number in range(3)]
    now[0] = 9.0
    masks.tick()  # all are paused, and the first goes on in the slow lane
    assert ("demote", 2) in host.noted
    assert ("go_on", 2) not in host.noted
    masks.compiled(2, None)  # it was said before the pause was obeyed
    assert dear[1].done()
    assert host.noted.count(("go_on", 2)) == 1


def test_what_is_loaded_again_costs_no_grammar_its_time():
    host, now = NotedHost(), [0.0]
    masks = Masks(host, clock=lambda: now[0])
    masks.start()
    masks.loaded(None)
    masks.prepare(choice("quick"))
    now[0] = 9.0
    masks.loaded(None)
    masks.tick()
    assert ("demote", 1) not in host.noted
