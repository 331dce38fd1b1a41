"""What ``vorrangctl top`` asks before it does something to a request."""

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from clients.python.admin_types import LiveRequest
from clients.python.admin_view import output_of
from timeline.printable import printable


def described(request: LiveRequest) -> str:
    """A request on one line."""
    name = f" ({request.request_id})" if request.request_id else ""
    tenant = f" of {request.tenant}" if request.tenant else ""
    return printable(
        f"{request.server_request_id}{name}{tenant}: level {request.level}, {output_of(request)} tokens"
    )


class ConfirmCancel(ModalScreen[bool]):
    """Whether a request is to be cancelled; True when it is."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, request: LiveRequest) -> None:
        super().__init__()
        self._request = request

    def compose(self) -> ComposeResult:
        """The widgets."""
        with Vertical(classes="dialog"):
            yield Static("Cancel this request?")
            yield Static(described(self._request), markup=False)
            with Horizontal():
                yield Button("No (n)", id="no", variant="primary")
                yield Button("Cancel it (y)", id="yes", variant="error")

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """A key has answered."""
        self.dismiss(yes)


class AskPriority(ModalScreen[str]):
    """The priority a request is to have: a class name or a level; empty = leave it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave it")]

    def __init__(self, request: LiveRequest) -> None:
        super().__init__()
        self._request = request

    def compose(self) -> ComposeResult:
        """The widgets."""
        with Vertical(classes="dialog"):
            yield Static(described(self._request), markup=False)
            yield Input(placeholder="interactive, standard, batch or -100..100 (low = urgent)")
            with Horizontal():
                for name in ("interactive", "standard", "batch"):
                    yield Button(name, id=name)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id or "")

    def action_leave(self) -> None:
        """Nothing is to change."""
        self.dismiss("")
