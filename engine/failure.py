"""Failures that nobody has foreseen, as they may be logged: where, not with what.

An exception's own text may hold what a request said (a chat template's does), and the local
variables on its stack hold all of it, the caller's token included. So a trace here is made of
class names and places in the code. Its text is added only where no request is concerned.
"""

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import structlog

#: Frames of one exception that are shown, from its beginning and its end: a recursion has a thousand.
FIRST_FRAMES, LAST_FRAMES = 4, 20
#: Exceptions of a chain, or a group, that are shown.
MAX_EXCEPTIONS = 8
#: Characters of an exception's text.
MAX_TEXT = 1000
#: Begins a note with the trace of another process, which is made here and holds no text.
REMOTE = "in the runner's process:\n"

#: They put objects into their messages, whose representation holds exceptions, arguments and results.
_TALKATIVE = ("asyncio", "grpc", "concurrent")


def trace_of(error: BaseException, *, with_text: bool) -> str:
    """Where an exception came from, and from which others; the last line names its class.

    Args:
        error: the exception.
        with_text: whether the exceptions' own words may be shown; never where a request was concerned.
    """
    return "\n\n".join(_described(one, with_text=with_text) for one in _chain(error))


def log_strays(log: Any) -> None:
    """Have all that Python, or a library, would print about failures logged as ``trace_of`` has them.

    Threads' and finalisers' exceptions, warnings, and records of ``logging`` from its level WARNING on,
    whatever handlers a library gives its loggers, now or when it is imported later.

    Args:
        log: a structlog logger.
    """

    def of_thread(arguments: "threading.ExceptHookArgs") -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            name = arguments.thread.name if arguments.thread else ""
            log.error("thread.failed", thread=name, exception=trace_of(arguments.exc_value, with_text=False))

    def unraisable(arguments: "sys.UnraisableHookArgs") -> None:
        if arguments.exc_value is not None:
            log.error("finaliser.failed", exception=trace_of(arguments.exc_value, with_text=False))

    threading.excepthook = of_thread
    sys.unraisablehook = unraisable
    strays = _Strays(log)

    def call_handlers(_logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno >= strays.level:
            strays.handle(record)

    setattr(logging.Logger, "callHandlers", call_handlers)  # noqa: B010 (mypy takes no assignment to a method)
    logging.captureWarnings(capture=True)


def on_loop_failure(loop: Any, context: dict[str, Any]) -> None:
    """What an event loop calls when a callback, or a task that nobody awaits, has failed."""
    error = context.get("exception")
    trace = trace_of(error, with_text=False) if isinstance(error, BaseException) else ""
    log = structlog.get_logger("vorrang.server")
    log.error("event_loop.failed", message=str(context.get("message", ""))[:200], exception=trace)


class _Strays(logging.Handler):
    """Takes what libraries log."""

    def __init__(self, log: Any) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record; the template alone where what is filled in may be anything."""
        try:
            is_talkative = record.name.partition(".")[0] in _TALKATIVE
            message = str(record.msg) if is_talkative else record.getMessage()
            values: dict[str, Any] = {"logger": record.name, "message": message[:MAX_TEXT]}
            if record.exc_info and record.exc_info[1] is not None:
                values["exception"] = trace_of(record.exc_info[1], with_text=False)
            level = "error" if record.levelno >= logging.ERROR else "warning"
            getattr(self._log, level)("library.said", **values)
        except Exception:  # a record that can't be made into words
            self._log.warning("library.said", logger=record.name, message="(no words)")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """What led to an exception, first cause first; the members of a group before it."""
    found: list[BaseException] = []
    waiting: list[BaseException] = [error]
    while waiting and len(found) < MAX_EXCEPTIONS:
        one = waiting.pop(0)
        if one in found:
            continue
        found.append(one)
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
        before = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if before is not None:
            waiting.append(before)
    return reversed(found)


def _described(error: BaseException, *, with_text: bool) -> str:
    lines = ["Traceback (most recent call last):"] if error.__traceback__ is not None else []
    lines += _frames(error.__traceback__)
    lines.append(_last_line(error, with_text=with_text))
    notes: list[Any] = getattr(error, "__notes__", [])
    for note in notes if isinstance(notes, list) else []:
        if isinstance(note, str) and note.startswith(REMOTE):
            lines.append(note)
    return "\n".join(lines)


def _frames(trace: TracebackType | None) -> list[str]:
    places = list(traceback.walk_tb(trace))
    left_out = len(places) - FIRST_FRAMES - LAST_FRAMES
    if left_out > 0:
        places = [*places[:FIRST_FRAMES], *places[-LAST_FRAMES:]]
    lines = []
    for index, (frame, number) in enumerate(places):
        if left_out > 0 and index == FIRST_FRAMES:
            lines.append(f"  ... {left_out} more ...")
        code = frame.f_code
        lines.append(f'  File "{code.co_filename[-300:]}", line {number}, in {code.co_name[:100]}')
    return lines


def _last_line(error: BaseException, *, with_text: bool) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if not with_text:
        return name
    try:
        text = str(error)
    except Exception:  # it has no words
        text = "(no words)"
    shortened = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
    return f"{name}: {shortened}" if text else name
