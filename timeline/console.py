"""A terminal on which text is text: nothing in it is markup, and nothing in it steers the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from timeline.printable import printable_lines


class PlainConsole(Console):
    """rich's console for what others have named: labels, ids, models, files.

    Text is shown as it is, without markup and emoji codes; where rich is to style
    something, it gets a ``Text``. Control characters come out as escapes.

    Args:
        more: as ``rich.console.Console`` takes them.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **more})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of what is to be printed, those of text without control characters."""
        for segment in super().render(renderable, options):
            if segment.control or not segment.text:
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)
