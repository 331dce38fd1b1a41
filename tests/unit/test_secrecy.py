"""What is shown and logged: no secret, no control character, nothing without bounds."""

import asyncio
import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from engine.errors import InvalidRequest, shown_value
from engine.failure import log_strays, on_loop_failure, trace_of
from engine.runner.channel import pack_error, unpack_error
from server.log import MAX_LINE_BYTES, BoundedRenderer, set_up
from tests.support import canaries
from timeline.printable import has_controls, printable, printable_lines
from timeline.secrecy import HIDDEN, SESSION_TOKEN_PREFIX, is_secret_setting, redacted

NASTY = "a\x1b[31mred\nb\r\x07\u202ec\u2028d\udc80\x9b\U000e0041"


@pytest.mark.parametrize(
    "text",
    [
        f"authorization: Bearer {canaries.TOKEN}",
        f"('authorization', 'bearer {canaries.TOKEN}')",
        f"BEARER   {canaries.TOKEN}, x",
        f"got {canaries.URL} and more",
        f"postgresql+x://:{canaries.PASSWORD}@host/db",
        f"-----BEGIN EC PRIVATE KEY-----\n{canaries.PASSWORD}\n-----END EC PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{canaries.PASSWORD}",
        "sha256:" + b"canary".hex() * 5,
        f"{SESSION_TOKEN_PREFIX}canary0123456789ABCDEF",
        "hf_canary0123456789ABCDEF",
    ],
)
def test_what_looks_like_a_secret_is_taken_out(text: str) -> None:
    shown = redacted(text)
    assert HIDDEN in shown
    assert not canaries.leaks(shown)
    assert b"canary".hex() not in shown


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:4317", "mail a@b.c", "a bearer token", "label sha256:short", "x://y/z@w"]
)
def test_what_is_none_stays(text: str) -> None:
    assert redacted(text) == text


def test_settings_that_are_secret_by_their_names() -> None:
    assert is_secret_setting("tenants.acme.token_hashes")
    assert is_secret_setting("tenants.acme.token_hashes.0")
    assert is_secret_setting("tracing.password")
    assert not is_secret_setting("server.default_max_tokens")
    assert not is_secret_setting("tenants.acme.tokens_per_s")
    assert not is_secret_setting("scheduler.speculation_tokens")


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable(NASTY) == r"a\x1b[31mred\nb\r\x07\u202ec\u2028d\udc80\x9b\U000e0041"
    assert has_controls("\x7f")
    assert not has_controls("Grüße, 世界 👩\u200d💻")
    assert printable_lines("a\tb\nc\x1b]0;x\x07\r") == "a\tb\nc\\x1b]0;x\\x07\\r"


def _nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**7,
        b"x" * 10**6,
        10**5000,
        -(10**5000),
        _nested(100_000),
        {"a": _nested(50)},
        [1] * 10**6,
        NASTY,
    ],
    ids=["text", "bytes", "number", "negative", "deep", "dict", "long", "nasty"],
)
def test_any_value_is_quoted_in_one_short_line(value: Any) -> None:
    shown = shown_value(value)
    assert len(shown) <= 80
    assert not has_controls(shown)
    assert str(InvalidRequest("field", "must be small", value)).endswith(shown)


def test_nothing_is_said_of_a_value_that_is_missing() -> None:
    assert str(InvalidRequest("spec", "must be given", None)) == "spec must be given"


def raised(depth: int = 0) -> BaseException:
    secret = canaries.TOKEN
    try:
        try:
            if depth:
                recursive(depth)
            raise KeyError(secret)
        except KeyError as cause:
            error = ValueError(f"bad {secret}")
            error.add_note(secret)
            raise error from cause
    except Exception as error:
        return error


def recursive(depth: int) -> None:
    if depth:
        recursive(depth - 1)
    else:
        raise KeyError(canaries.TOKEN)


def test_a_trace_says_where_and_not_with_what() -> None:
    trace = trace_of(raised(), with_text=False)
    assert "ValueError" in trace
    assert "KeyError" in trace
    assert "in raised" in trace
    canaries.check(trace, "a trace")
    assert canaries.TOKEN in trace_of(raised(), with_text=True)


def test_a_trace_is_bounded_whatever_was_raised() -> None:
    group = ExceptionGroup("x" * 10**6, [raised(500) for _ in range(100)])
    assert len(trace_of(group, with_text=True)) < 40_000
    assert "more ..." in trace_of(raised(500), with_text=True)


def test_a_trace_from_the_runners_process_says_where_too() -> None:
    error = unpack_error(pack_error(raised()))
    assert "in raised" in trace_of(error, with_text=False)
    canaries.check(trace_of(error, with_text=False), "a trace")


def line(as_json: bool = True, **event: Any) -> str:
    return BoundedRenderer(as_json=as_json)(None, "info", event)


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**7,
        "\x1b" * 10**6,
        ["x" * 10**5] * 1000,
        {str(i): "y" * 1000 for i in range(1000)},
        _nested(100),
    ],
    ids=["long", "controls", "list", "dict", "deep"],
)
def test_a_line_is_bounded(value: Any, as_json: bool) -> None:
    made = line(as_json, event="x.y", level="info", value=value, **{f"k{i}": "z" * 500 for i in range(100)})
    assert len(made.encode()) <= MAX_LINE_BYTES
    assert "x.y" in made
    if as_json:
        assert json.loads(made)["event"] == "x.y"


def test_a_label_forges_no_line_and_steers_no_terminal() -> None:
    made = line(False, event="request.ended", label=NASTY, both={"a": [NASTY]})
    assert "\n" not in made
    assert r"\x1b[31mred\nb" in made
    assert "\x1b[31mred" not in made
    assert json.loads(line(event="request.ended", label=NASTY[:-3]))["label"].startswith("a\x1b")
    assert "\x1b" not in line(event="request.ended", label=NASTY)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What was logged so far, as ``set_up`` would have it; the hooks of this process are put back."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(logging.Logger, "callHandlers", logging.Logger.callHandlers)
    config = structlog.get_config()
    writer = set_up("debug", "json")

    def text() -> str:
        writer.close()
        return file.getvalue()

    yield text
    writer.close()
    logging.captureWarnings(capture=False)
    structlog.configure(**config)


# What earlier tests left to be collected is not what is looked at here.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_python_and_libraries_say_of_failures_holds_no_secret(logged: Any) -> None:
    fresh = structlog.wrap_logger(None)  # the loggers of modules may be bound already
    log_strays(fresh.bind())
    error = raised()

    def die() -> None:
        raise error

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()

    class Bad:
        def __del__(self) -> None:
            raise error

    bad = Bad()
    del bad
    logging.getLogger("asyncio").error("Task %r failed", error, exc_info=error)
    logging.getLogger("grpc._cython").exception("Unexpected %s", error)
    library = logging.getLogger("library")
    library.propagate = False
    library.addHandler(logging.StreamHandler(sys.stdout))  # some bring their own, when they are imported
    library.warning("took %s", f"Bearer {canaries.TOKEN}")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"Bearer {canaries.TOKEN}", stacklevel=1)
    try:
        raise error
    except ValueError:
        fresh.error("x.failed", exc_info=True)
    text = logged()
    for found in ("thread.failed", "finaliser.failed", "library.said", "x.failed", "in raised"):
        assert found in text
    canaries.check(text, "the log")


@pytest.mark.asyncio
async def test_a_task_that_nobody_awaits_fails_without_its_words(logged: Any) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_loop_failure)

    def callback() -> None:
        raise raised()

    loop.call_soon(callback)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    text = logged()
    assert "event_loop.failed" in text
    assert "in callback" in text
    canaries.check(text, "the log")
