"""A ``GrammarHost`` with a process for each grammar, forked by one that has the library (``nursery``).

One thread reads what the processes say. What is said to them is sent by whoever says it, as far as
their sockets take it at once; the thread sends the rest, so nobody waits for a process that is busy.
"""

import contextlib
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import structlog

from engine.descriptors import is_shortage
from engine.errors import InternalError
from engine.failure import trace_of
from engine.grammar import GrammarSpec
from engine.runner import process_life
from engine.runner.channel import FrameReader, Message, frame, unpack_error
from engine.runner.grammars import nursery
from engine.runner.grammars.compiled import GrammarCompiler
from engine.runner.grammars.following import Fill
from engine.runner.grammars.host import Ended, Told
from engine.runner.grammars.limits import GrammarLimits

#: Seconds between two ticks while anything is compiled or asked for.
TICK_S = 0.02
#: Seconds of a processor between two looks at a place from which on it counts as busy.
BUSY_S = 0.008
#: Times in a row that the process with the library may die while it loads.
MAX_FAILED_LOADS = 3
#: Seconds after which a process that there was no room for is tried again.
RETRY_S = 0.25

log = structlog.get_logger("vorrang.runner")


class _Place:
    """A grammar's process, as far as one must know it."""

    def __init__(self, number: int, connection: socket.socket, spec: GrammarSpec) -> None:
        self.number = number
        self.spec = spec
        self.connection = connection
        self.reader = FrameReader()
        self.unsent = bytearray(frame((spec,)))
        self.pid = 0
        self.is_compiled = False
        self.num_asked = 0  # fills that are not answered
        self.is_closed = False
        self.is_behind = False  # gives way to all else
        self.cpu_s: float | None = None  # at the last look


class ForkingHost:
    """See the module.

    Args:
        make_compiler: picklable; called in the process that has the library.
        vocab_size: ids that logits are computed for.
        limits: of each grammar.
    """

    def __init__(
        self, make_compiler: Callable[[], GrammarCompiler], vocab_size: int, limits: GrammarLimits
    ) -> None:
        self._loading = (make_compiler, vocab_size, limits)
        self._limits = limits
        self._lock = threading.RLock()
        self._places: dict[int, _Place] = {}
        self._nursery: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._is_loaded = self._is_unloadable = False
        self._num_failed_loads = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._gone: list[_Place] = []
        self._unforked: dict[int, GrammarSpec] = {}  # there was no room for a process; it is tried again
        self._next_try = 0.0

    def start(self, told: Told) -> None:
        """See ``GrammarHost``."""
        self._told = told
        self._is_closed = False
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process that has the library; None while there is none."""
        return None if self._nursery is None else self._nursery.pid

    def pids(self) -> list[int]:
        """Processes of grammars."""
        with self._lock:
            return [place.pid for place in self._places.values() if place.pid]

    # What is asked of it.

    def compile(self, number: int, spec: GrammarSpec) -> None:
        """See ``GrammarHost``."""
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:
            if not is_shortage(error):
                raise
            self._put_off(number, spec, str(error))
            return
        mine.setblocking(False)
        with theirs, self._lock:
            if self._is_closed:  # nobody would ever close it
                mine.close()
                return
            if self._orders is None:  # for the process that takes the place of the one that died
                mine.close()
                self._unforked[number] = spec
                return
            self._places[number] = _Place(number, mine, spec)
            self._order(nursery.FORK, number, theirs.fileno())
        self._wake_up()

    def demote(self, number: int) -> None:
        """See ``GrammarHost``."""
        self._order(nursery.DEMOTE, number)
        self._order(nursery.STOP, number)

    def pause(self, number: int) -> None:
        """See ``GrammarHost``."""
        self._order(nursery.STOP, number)

    def go_on(self, number: int) -> None:
        """See ``GrammarHost``."""
        self._order(nursery.CONTINUE, number)

    def fill(self, number: int, fill: Fill) -> None:
        """See ``GrammarHost``."""
        self._send(number, (fill,))

    def drop(self, number: int, key: int) -> None:
        """See ``GrammarHost``."""
        self._send(number, (key,))

    def give_way(self, number: int) -> bool:
        """See ``GrammarHost``; two looks are needed."""
        with self._lock:
            place = self._places.get(number)
            if place is None or not place.pid:
                return False
            if not place.is_behind:
                before, place.cpu_s = place.cpu_s, _cpu_s(place.pid)
                if before is not None and place.cpu_s - before > BUSY_S:
                    place.is_behind = True
                    self._order(nursery.GIVE_WAY, number)
            return place.is_behind

    def end(self, number: int) -> None:
        """See ``GrammarHost``."""
        with self._lock:
            self._unforked.pop(number, None)
            place = self._places.pop(number, None)
            if place is not None:
                self._order(nursery.KILL, number)
                self._wake_up()
                self._gone.append(place)

    def close(self) -> None:
        """See ``GrammarHost``."""
        self._is_closed = True
        if self._thread is not None:
            self._wake_up()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
            for each in (self._selector, self._wake, self._waker):
                each.close()

    # What is said.

    def _order(self, order: int, number: int, *descriptors: int) -> None:
        with self._lock:
            if self._orders is not None:
                with contextlib.suppress(OSError):  # its end is seen elsewhere
                    socket.send_fds(self._orders, [nursery.ORDER.pack(order, number)], descriptors)

    def _send(self, number: int, message: Message) -> None:
        with self._lock:
            place = self._places.get(number)
            if place is None:
                return
            if isinstance(message[0], Fill):
                place.num_asked += 1
                place.cpu_s = None
            was_idle = not place.unsent
            place.unsent += frame(message)
            if was_idle:
                _flush(place)
            if place.unsent or place.num_asked == 1:
                self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"x")

    def _put_off(self, number: int, spec: GrammarSpec, cause: str) -> None:
        """There is no room for a process now; that is no fault of the grammar's."""
        log.warning("grammar.start_delayed", cause=cause, grammar=spec.field)
        with self._lock:
            self._unforked[number] = spec
            self._next_try = time.monotonic() + RETRY_S
        self._wake_up()

    # On the thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.error("grammars.failed", exception=trace_of(error, with_text=True))
            self._told.loaded(InternalError("grammars"))
        finally:
            self._end_nursery()

    def _serve(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._wake.setblocking(False)
        self._spawn()
        next_tick = 0.0
        while not self._is_closed:
            self._try_again()
            is_busy = self._look_after_places()
            for key, events in self._selector.select(TICK_S if is_busy else None):
                if key.fileobj is self._wake:
                    with contextlib.suppress(BlockingIOError):
                        self._wake.recv(65536)
                elif key.data is None:
                    self._hear_nursery()
                else:
                    self._hear(key.data, events)
            if is_busy and self._is_loaded and time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._told.tick()

    def _try_again(self) -> None:
        """Begin with what there was no room for."""
        with self._lock:
            if not self._unforked or time.monotonic() < self._next_try:
                return
            unforked, self._unforked = self._unforked, {}
            for number, spec in unforked.items():
                self.compile(number, spec)

    def _look_after_places(self) -> bool:
        """Watch new sockets, and those that have something unsent; whether anything is going on."""
        with self._lock:
            for place in self._gone:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(place.connection)
                place.connection.close()
            self._gone.clear()
            is_busy = bool(self._unforked)
            known = self._selector.get_map()
            for place in self._places.values():
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if place.unsent else 0)
                if place.is_closed:
                    if place.connection in known:
                        self._selector.unregister(place.connection)
                elif place.connection not in known:
                    self._selector.register(place.connection, wanted, place)
                elif known[place.connection].events != wanted:
                    self._selector.modify(place.connection, wanted, place)
                is_busy |= not place.is_compiled or place.num_asked > 0
            return is_busy

    def _spawn(self) -> None:
        """Start the process that has the library. It dies with this thread."""
        while True:
            try:
                self._nursery, mine = process_life.spawn_connected("engine.runner.grammars.nursery")
                break
            except OSError as error:
                if not is_shortage(error) or self._is_closed:
                    raise
                log.warning("grammars.start_delayed", cause=str(error))
            time.sleep(RETRY_S)
        mine.sendall(frame(("load", *self._loading)))
        self._is_loaded = False
        self._reader = FrameReader()
        self._selector.register(mine, selectors.EVENT_READ, None)
        self._orders = mine

    def _end_nursery(self) -> None:
        with self._lock:
            places, self._places = [*self._places.values(), *self._gone], {}
            self._gone.clear()
            self._unforked.clear()
            if self._orders is not None:
                self._orders.close()
                self._orders = None
            for place in places:
                place.connection.close()
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()

    def _hear_nursery(self) -> None:
        assert self._orders is not None
        assert self._nursery is not None
        try:
            data = self._orders.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._nursery_died()
            return
        for message in self._reader.feed(data):
            self._obey_nursery(message)

    def _obey_nursery(self, message: Message) -> None:
        match message:
            case (nursery.LOADED, packed):
                self._is_loaded, self._is_unloadable = packed is None, packed is not None
                self._num_failed_loads = 0
                self._told.loaded(None if packed is None else unpack_error(packed))
            case (nursery.FORKED, number, pid):
                with self._lock:
                    if number in self._places:
                        self._places[number].pid = pid
            case (nursery.EXITED, number, code, _):
                self._exited(number, code)
            case (nursery.UNFORKED, number, cause):
                self._unfork(number, cause)
            case ("log", level, values):
                getattr(log, level)(values.pop("event", ""), **values)

    def _nursery_died(self) -> None:
        """With it all grammars' processes are gone; another one takes its place, unless that is in vain."""
        with self._lock:
            assert self._orders is not None
            assert self._nursery is not None
            self._selector.unregister(self._orders)
            self._orders.close()
            self._nursery.kill()
            code = self._nursery.wait()
            self._orders = None
            was_loaded = self._is_loaded
            for place in [place for place in self._places.values() if not place.pid]:  # they never began
                self._gone.append(self._places.pop(place.number))
                self._unforked[place.number] = place.spec
            numbers = list(self._places)
        if self._is_closed:
            return
        death = process_life.death_by(code)
        log.error("grammars.died", cause=death.cause)
        if not was_loaded:
            self._num_failed_loads += 1
            if self._num_failed_loads == MAX_FAILED_LOADS:
                self._is_unloadable = True
                self._told.loaded(InternalError("grammars"))
        if self._is_unloadable:  # all have been told
            with self._lock:
                self._gone += self._places.values()
                self._places.clear()
                self._unforked.clear()
            return
        self._spawn()
        for number in numbers:
            self._exited(number, -9)

    def _unfork(self, number: int, cause: str) -> None:
        with self._lock:
            place = self._places.pop(number, None)
            if place is not None:
                self._gone.append(place)
                self._put_off(number, place.spec, cause)

    def _exited(self, number: int, code: int) -> None:
        with self._lock:
            place = self._places.pop(number, None)
            if place is None:
                return
            self._gone.append(place)
        if self._read(place) is not None:  # what it said before its end
            self._told.ended(number, _ended(code, self._limits, is_compiled=place.is_compiled))

    def _hear(self, place: _Place, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with self._lock:
                _flush(place)
        if events & selectors.EVENT_READ and not self._read(place):
            with self._lock:
                place.is_closed = True  # how it ended is told by the nursery

    def _read(self, place: _Place) -> bool | None:
        """Take what a process says; False = it says no more, None = its grammar was refused."""
        is_open = True
        data = b""
        with contextlib.suppress(BlockingIOError):
            try:
                while piece := place.connection.recv(262144):
                    data += piece
                is_open = False
            except ConnectionError:
                is_open = False
        for kind, said in place.reader.feed(data):
            if kind == nursery.COMPILED:
                if said is not None:
                    with self._lock:
                        self._places.pop(place.number, None)
                        self._gone.append(place)
                    self._told.compiled(place.number, unpack_error(said))
                    return None
                place.is_compiled = True
                self._told.compiled(place.number, None)
            else:
                with self._lock:
                    place.num_asked -= 1
                    place.cpu_s = None
                self._told.filled(place.number, said)
        return is_open


def _flush(place: _Place) -> None:
    with contextlib.suppress(BlockingIOError, OSError):
        del place.unsent[: place.connection.send(place.unsent)]


def _cpu_s(pid: int) -> float:
    """Seconds of a processor that a process has had; 0 where nobody can say."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of another process, as Linux numbers it
    except OSError:
        return 0.0


def _ended(code: int, limits: GrammarLimits, *, is_compiled: bool) -> Ended:
    """Why a grammar's process is no more, and whether its grammar is to blame."""
    cause = process_life.death_by(code).cause
    if code == -signal.SIGPROF and is_compiled:
        return Ended(cause, f"must not take more than {limits.mask_s_max:g} s of a processor for one output")
    if code == -signal.SIGPROF:
        return Ended(cause, f"must compile within {limits.compile_s_max:g} s of a processor")
    if code == -signal.SIGKILL:
        return Ended(cause)
    what = "be followed" if is_compiled else "compile"
    room = f"{limits.bytes_max >> 20} MiB"
    return Ended(cause, f"must {what} within {room} and without being nested too deeply")
