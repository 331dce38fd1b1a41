"""Work that a caller can make dear, in one place: how much of it, where, and whose turn it is.

A caller's texts, grammars, numbers of things are its own choice; what they cost must be its
own, too. So for every kind of such work there is a bound in bytes or entries that is looked at
before anything is done, and what is left is done where it holds neither the event loop nor
the GIL nor a step, in an order of its own. docs/SECURITY.md has the table of kinds with what
each was measured to cost; ``tests/e2e/test_isolation.py`` measures it.

Texts (tokenising, chat templates, bad words, detokenising) are done here: short ones and
long ones by a worker each, so that no short one ever waits for a long one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from engine.descriptors import is_shortage
from engine.text import Tokenizer
from engine.text_work.jobs import TextJob
from engine.text_work.places import TextPlace, TextThread
from engine.text_work.process import TextProcess
from engine.text_work.worker import TokenizerSource
from server.errors import ProcessStarting
from server.slots import Slots, SlotsStatistics, Turn

#: Texts of so many bytes are short: some 4,000 tokens of prose, 20 ms at the very worst.
SHORT_BYTES = 16 * 1024
#: How much the worker for long texts gives way: to a third of a processor beside a step that wants all of it.
LONG_NICENESS = 3
#: Texts that may wait for a worker, and their size.
MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 * 1024 * 1024

Result = TypeVar("Result")

log = structlog.get_logger("vorrang.server")


@dataclass(frozen=True, slots=True)
class TextStatistics:
    """A look at the work on texts.

    Attributes:
        short: turns of short texts.
        long: turns of long ones.
    """

    short: SlotsStatistics
    long: SlotsStatistics


class TextWork:
    """Works on callers' texts. All methods are for the event loop's thread.

    Args:
        short: does short ones; several may.
        long: does the others.
    """

    def __init__(self, short: Sequence[TextPlace], long: TextPlace) -> None:
        self._places = (*short, long)
        self._free = {True: list(short), False: [long]}
        self._slots = {
            is_short: Slots(
                name,
                len(self._free[is_short]),
                max_waiting=MAX_WAITING,
                max_waiting_bytes=MAX_WAITING_BYTES,
            )
            for is_short, name in ((True, "short texts"), (False, "long texts"))
        }

    @classmethod
    def on_threads(cls, tokenizer: Tokenizer) -> "TextWork":
        """Done by threads of this process."""
        names = ("short-texts-0", "short-texts-1", "long-texts")
        *short, long = (TextThread(tokenizer, name) for name in names)
        return cls(short, long)

    @classmethod
    async def in_processes(cls, source: TokenizerSource) -> "TextWork":
        """Done by processes of their own; the one for long texts starts with the first of them.

        Raises:
            TextProcessDied: it did not start.
            Exception: the tokenizer can't be loaded there.

        Cancellation: nothing is left behind.
        """
        short = TextProcess(source)
        await short.start()
        return cls([short], TextProcess(source, niceness=LONG_NICENESS))

    def warm_up(self) -> None:
        """Load what the first chat would wait for; nobody waits for it."""
        self._places[0].warm_up()

    def statistics(self) -> TextStatistics:
        """How things stand."""
        return TextStatistics(self._slots[True].statistics(), self._slots[False].statistics())

    async def run(self, job: TextJob[Result], turn: Turn) -> Result:
        """Do a job when it is its turn.

        Raises:
            QueueFull, Displaced: too many wait.
            Cancelled: ``turn.leave`` was called.
            ProcessStarting: there is none, and none could be started.
            VorrangError: what the job refuses, or ``TooDear``.

        Cancellation: what waits leaves; what was begun goes on for nobody, to its bound.
        """
        num_bytes = job.num_bytes
        is_short = num_bytes <= SHORT_BYTES
        free = self._free[is_short]

        async def work() -> Result:
            place = free.pop()
            try:
                return await place.run(job)
            except OSError as error:
                if not is_shortage(error):
                    raise
                log.warning("text_process.not_started", cause=error.strerror or str(error))
                raise ProcessStarting from None
            finally:
                free.append(place)

        return await self._slots[is_short].run(work, turn, num_bytes)

    async def close(self) -> None:
        """End what is being done, and leave nothing behind."""
        for slots in self._slots.values():
            await slots.close()
        for place in self._places:
            await place.close()
