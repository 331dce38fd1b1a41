"""Which event loop runs the server: uvloop where it is installed, since it costs less by message."""

import asyncio
from collections.abc import Callable

from server.settings import SettingsError


def factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the event loop.

    Args:
        name: ``auto``, ``asyncio`` or ``uvloop``.

    Raises:
        SettingsError: it is not installed.
    """
    if name != "asyncio":
        try:
            import uvloop
        except ImportError:
            if name == "uvloop":
                rule = "uvloop is not installed; install vorrang[uvloop]"
                raise SettingsError(f"server.event_loop: {rule}") from None
        else:
            return uvloop.new_event_loop
    return asyncio.new_event_loop
