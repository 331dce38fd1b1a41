"""What others name is text wherever it is shown: no markup, no escape sequence, no line of its own."""

import ast
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clients.python import admin_view, chat_view, generate, top_dialogs, top_view
from clients.python.admin_types import Grant, LiveRequest, Preemption, Step
from clients.python.events import Usage
from clients.python.progress import Progress
from engine.errors import InvalidRequest
from server.convert import check_plain
from timeline import chrome, picture
from timeline.account import Account
from timeline.console import PlainConsole
from timeline.run import Run, Stay, Wait
from timeline.show import print_account

ROOT = Path(__file__).parents[2]
NASTY = (
    "[/red]", "[bold]x", ":smile:", "\x1b]0;owned\x07", "a\nforged line", "\x9b2J", "\u202egnp",
    "$\\frac$ _x", "\r",
)  # fmt: skip


def request(text: str) -> LiveRequest:
    return LiveRequest(
        server_request_id="r1", request_id=text, tenant=text, level=0, state="DECODE",
        usage=Usage(prompt_tokens=7, output_tokens=3), age_s=1.25, num_blocks=2, label=text,
        max_output_tokens=10, num_computed_tokens=9, num_known_tokens=10, starved=False,
    )  # fmt: skip


def step(text: str) -> Step:
    made = Step.__new__(Step)
    values: dict[str, Any] = {
        "grants": (Grant(text, 0, 1, 0),),
        "preemptions": (Preemption(text, text, text, 1, 1),),
        "bound_gate": text,
    }
    for field in dataclasses.fields(Step):
        object.__setattr__(made, field.name, values.get(field.name, 0))
    return made


def account(text: str) -> Account:
    made: dict[str, Any] = {}
    for field in dataclasses.fields(Account):
        kind = str(field.type)
        made[field.name] = text if kind == "str" else () if "tuple" in kind else 0
    return Account(**{**made, "phase": "decode", "ttft_s": None, "num_ahead": None, "delivered": None})


def is_harmless(shown: str) -> bool:
    return not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)


@pytest.mark.parametrize("console_class", [PlainConsole, Console])
@pytest.mark.parametrize("text", NASTY)
def test_views_show_names_as_they_are(text: str, console_class: type[Console]) -> None:
    file = io.StringIO()
    console = console_class(file=file, width=200)
    console.print(admin_view.requests_table([request(text)]))
    console.print(admin_view.step_line(step(text)), soft_wrap=True)
    for cell in top_view.cells(request(text)):
        console.print(cell)
    print_account(console, account(text))
    shown = file.getvalue()
    assert is_harmless(shown)
    assert is_harmless(top_dialogs.described(request(text)))
    if text.isprintable() and len(text) < 10:
        assert text in shown
    assert "\nforged line" not in shown


@pytest.mark.parametrize("text", NASTY)
def test_a_console_of_ours_takes_any_text(text: str) -> None:
    file = io.StringIO()
    console = PlainConsole(file=file, width=200, force_terminal=True, color_system=None)
    console.print(text, highlight=False)
    console.print(chat_view.marked_text(told(text)))
    assert is_harmless(file.getvalue())
    if text.isprintable():
        assert file.getvalue().startswith(text)


def told(text: str) -> Progress:
    progress = Progress()
    progress.text = text
    return progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_output_of_a_model_does_not_steer_a_terminal_and_reaches_a_file_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "line\n\tcode \x1b]52;c;aGk=\x07 \x1b[2J\r\x08 é 👩\u200d💻"
    monkeypatch.setattr("sys.stdout", Terminal())
    shown = generate.output_text(said)
    assert shown.startswith("line\n\tcode ")
    assert not re.search("[\x00-\x08\x0b-\x1f]", shown)
    assert shown.endswith("é 👩\u200d💻")
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    with chat_view.PlainAnswer(told("")) as view:
        view.show(said)
    assert "\x1b" not in terminal.getvalue()
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert generate.output_text(said) == said


@pytest.mark.slow
@pytest.mark.parametrize("text", NASTY)
def test_pictures_and_traces_of_any_name_are_whole(text: str, tmp_path: Path) -> None:
    from xml.etree import ElementTree

    stays, waits = [Stay(0, text, "batch", 0.0, 1.0)], [Wait(0, text, "batch", "queued", 0.0, 0.5)]
    run = Run(("interactive", "batch"), 1, 4, stays, waits, end_s=1.0)
    picture.draw(run, tmp_path / "run.svg")
    ElementTree.parse(tmp_path / "run.svg")
    file = io.StringIO()
    chrome.write(run, file)
    assert file.getvalue().isascii()


@pytest.mark.parametrize("text", ["a\x1b[31m", "a\nb", "a\tb", "\x00", "\u2028", "\u202e", "\x85", "\ufeff"])
def test_control_characters_in_a_label_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="label must hold no control characters, got '") as caught:
        check_plain("label", text)
    assert is_harmless(str(caught.value))
    check_plain("label", "[/red] Grüße 世界 👩\u200d💻 :smile:")


@pytest.mark.slow
def test_nobody_prints_past_our_console() -> None:
    for package in ("clients", "server", "engine", "timeline", "report"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "console.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                keywords = {keyword.arg for keyword in node.keywords}
                assert name != "Console", f"{path}: PlainConsole takes text as text"
                assert name != "TextColumn" or "markup" in keywords, path
                literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
                assert name != "notify" or literal or "markup" in keywords, path
