"""The screen of ``vorrangctl top``: a textual application over ``ControlClient``."""

import asyncio
import time
from contextlib import suppress
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.coordinate import Coordinate
from textual.css.query import NoMatches
from textual.widgets import DataTable, Footer, Static

from clients.python import top_view
from clients.python.admin_client import ControlClient
from clients.python.admin_types import LiveRequest, ServerInfo
from clients.python.admin_view import STYLE_BY_CLASS
from clients.python.errors import AccessDenied, Unimplemented, VorrangError
from clients.python.top_dialogs import AskPriority, ConfirmCancel
from clients.python.top_state import COLUMNS, Board, Reading
from timeline.printable import printable
from workloads.classes import class_of

#: Requests that are listed at most: more than fit on a screen.
MAX_ROWS = 500
_CLASSES = ("", *STYLE_BY_CLASS)


class TopApp(App[VorrangError | None]):
    """Watches a server and steers its requests; ends with an error it can't live with, or None.

    Args:
        client: an open client of ControlService.
        info: what it said of its server.
        interval_s: seconds between two looks.

    Attributes:
        board: what is shown.
    """

    TITLE = "vorrangctl top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1; }
    #classes { height: auto; padding: 0 1; margin: 1 0 0 0; }
    #requests { height: 1fr; margin: 1 0 0 0; scrollbar-size: 0 1; }
    ModalScreen { align: center middle; }
    .dialog { width: 64; height: auto; padding: 1 2; border: round $primary; background: $surface; }
    .dialog Horizontal { height: auto; margin: 1 0 0 0; }
    .dialog Button { margin: 0 2 0 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("c", "cancel_request", "Cancel request"),
        Binding("p", "change_priority", "Priority"),
        Binding("s", "next_column", "Sort by"),
        Binding("r", "reverse", "Reverse"),
        Binding("f", "filter", "Class"),
        Binding("space", "freeze", "Freeze"),
    ]

    def __init__(self, client: ControlClient, info: ServerInfo, interval_s: float = 1.0) -> None:
        super().__init__()
        self.board = Board()
        self._client = client
        self._info = info
        self._interval_s = interval_s
        self._frozen = False
        self._row_ids: list[str] = []

    def compose(self) -> ComposeResult:
        """The widgets."""
        with Vertical():
            yield Static(id="head")
            yield Static(id="classes")
            yield DataTable(id="requests", cursor_type="row", zebra_stripes=True)
            yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self._draw_headings()
        self._draw()
        self._watch()

    @work(exclusive=True, group="watch")
    async def _watch(self) -> None:
        """Look at the server for ever; what it does meanwhile, even end, is shown and survived."""
        while True:
            await self._look()
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        try:
            if self.board.trouble:
                self._info = await self._client.info()  # it may be another one
            load = await self._client.load()
            requests = await self._client.requests(limit=MAX_ROWS)
        except (AccessDenied, Unimplemented) as error:
            self.exit(error)
            return
        except VorrangError as error:
            self.board.trouble = error.message
        else:
            self.board.take(Reading(time.monotonic(), load, tuple(requests)))
        if not self._frozen:
            with suppress(NoMatches):  # the widgets of an app that ends go before those who look
                self._draw()

    # What is drawn

    def _draw(self) -> None:
        head = top_view.head(self.board, self._info, self._client.target, self.size.width - 2)
        self.query_one("#head", Static).update(head)
        self.query_one("#classes", Static).update(top_view.classes(self.board))
        self._draw_rows()

    def _draw_headings(self) -> None:
        table = self.query_one(DataTable)
        for index, column in enumerate(COLUMNS):
            table.add_column(self._heading(index), key=column.name)

    def _heading(self, index: int) -> Text:
        column, board = COLUMNS[index], self.board
        mark = (" ▲" if board.reverse else " ▼") if index == board.sort_column else ""
        return Text(column.name + mark, justify="right" if column.numeric else "left")

    def _draw_rows(self, *, with_headings: bool = False) -> None:
        """Put the rows where they belong; the cursor stays on its request."""
        table = self.query_one(DataTable)
        rows = self.board.rows(class_of)
        ids = [request.server_request_id for request in rows]
        cells = [top_view.cells(request) for request in rows]
        if ids == self._row_ids and not with_headings:
            for row, values in enumerate(cells):
                for column, value in enumerate(values):
                    table.update_cell_at(Coordinate(row, column), value, update_width=True)
            return
        selected, scroll_y = self.selected_id, table.scroll_y
        table.clear(columns=with_headings)
        if with_headings:
            self._draw_headings()
        for request_id, values in zip(ids, cells, strict=True):
            table.add_row(*values, key=request_id)
        self._row_ids = ids
        if selected in ids:
            table.move_cursor(row=ids.index(selected), animate=False, scroll=False)
        table.set_scroll(None, scroll_y)

    # Whom a key is about

    @property
    def selected_id(self) -> str:
        """The server's id of the request under the cursor; empty = none."""
        row = self.query_one(DataTable).cursor_row
        return self._row_ids[row] if 0 <= row < len(self._row_ids) else ""

    def _selected(self) -> LiveRequest | None:
        latest, selected = self.board.latest, self.selected_id
        requests = latest.requests if latest is not None else ()
        return next((r for r in requests if r.server_request_id == selected), None)

    # Keys

    @work(group="dialog", exclusive=True)
    async def action_cancel_request(self) -> None:
        """Cancel the request under the cursor, if that is meant."""
        request = self._selected()
        if request is None or not await self.push_screen_wait(ConfirmCancel(request)):
            return
        request_id = request.server_request_id
        try:
            found = await self._client.cancel_request(request_id)
        except VorrangError as error:
            self.notify(top_view.explanation(error), severity="error", markup=False)
        else:
            name = printable(request_id)
            said = f"{name} is cancelled" if found else f"{name} has ended before"
            self.notify(said, markup=False)
        await self._look()

    @work(group="dialog", exclusive=True)
    async def action_change_priority(self) -> None:
        """Ask for another priority for the request under the cursor."""
        request = self._selected()
        if request is None:
            return
        priority = await self.push_screen_wait(AskPriority(request))
        if not priority:
            return
        try:
            level = await self._client.set_priority(request.server_request_id, priority)
        except (VorrangError, ValueError) as error:
            self.notify(top_view.explanation(error), severity="error", markup=False)
        else:
            self.notify(printable(f"{request.server_request_id} has level {level}"), markup=False)
        await self._look()

    @on(DataTable.HeaderSelected)
    def _heading_clicked(self, event: DataTable.HeaderSelected) -> None:
        self._sort_by(event.column_index)

    def action_next_column(self) -> None:
        """Sort by the next column."""
        self._sort_by((self.board.sort_column + 1) % len(COLUMNS))

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._sort_by(self.board.sort_column)

    def _sort_by(self, column: int) -> None:
        self.board.sort_by(column)
        self._draw_rows(with_headings=True)

    def action_filter(self) -> None:
        """Show one class after the other, then all."""
        self.board.class_name = _CLASSES[(_CLASSES.index(self.board.class_name) + 1) % len(_CLASSES)]
        self._draw()

    def action_freeze(self) -> None:
        """Let the screen stand still, or go on."""
        self._frozen = not self._frozen
        self.sub_title = "frozen" if self._frozen else ""
        if self._frozen:
            self.notify("The screen stands still; space lets it go on")
        else:
            self._draw()
