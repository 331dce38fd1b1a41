"""``vorrangctl top``: watch a server and steer its requests."""

import sys
from typing import Annotated

import typer

from clients.python.admin_client import ControlClient
from clients.python.command import DEFAULT_TARGET, EXIT_USAGE, Control, Target, run


def top(
    target: Target = DEFAULT_TARGET,
    control: Control = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch seats, queue, KV and requests, and cancel or reprioritise them; for operators."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stderr.write("vorrangctl: top needs a terminal; see `admin load` and `admin requests`\n")
        raise typer.Exit(EXIT_USAGE)
    run(_top(control or target, interval))


async def _top(target: str, interval_s: float) -> None:
    # Textual takes almost half a second to import, which no other command should pay.
    from clients.python.top_app import TopApp

    async with ControlClient.from_environment(target) as client:
        info = await client.info()  # before the screen is taken, so that a wrong address is one line
        error = await TopApp(client, info, interval_s).run_async()
    if error is not None:
        raise error
