"""``vorrangctl admin``: look into a server and steer it."""

import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from clients.python import admin_view
from clients.python.admin_client import ControlClient
from clients.python.admin_types import Step
from clients.python.command import DEFAULT_TARGET, EXIT_FAILED, Control, Target, run
from timeline.console import PlainConsole
from timeline.printable import printable

app = typer.Typer(
    name="admin",
    help="Look into a server and steer it; for operators.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="The server's id, or the client's.")]
_PLAIN_COLUMNS = 160


@app.command()
def info(target: Target = DEFAULT_TARGET, control: Control = None, as_json: AsJson = False) -> None:
    """Version, model, policy and limits of the server."""
    _show(target, control, lambda client: client.info(), admin_view.info_table, as_json=as_json)


@app.command()
def load(target: Target = DEFAULT_TARGET, control: Control = None, as_json: AsJson = False) -> None:
    """Seats, queue by class, KV blocks and counts since the start."""
    _show(target, control, lambda client: client.load(), admin_view.load_table, as_json=as_json)


@app.command()
def requests(
    target: Target = DEFAULT_TARGET,
    control: Control = None,
    class_name: Annotated[str, typer.Option("--class", help="Only those of a class.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Most to be listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Requests that are alive, most urgent first."""

    async def ask(client: ControlClient) -> Any:
        return await client.requests(class_name=class_name, limit=limit)

    _show(target, control, ask, admin_view.requests_table, as_json=as_json)


@app.command()
def cancel(request_id: RequestId, target: Target = DEFAULT_TARGET, control: Control = None) -> None:
    """Cancel a request, whoever's. Fails when it is not alive."""

    async def ask(client: ControlClient) -> bool:
        if await client.cancel_request(request_id):
            return True
        return await client.cancel_request((await client.find(request_id)).server_request_id)

    if not run(_with(target, control, ask)):
        sys.stderr.write(f"vorrangctl: request {request_id!r} has just ended\n")
        raise typer.Exit(EXIT_FAILED)
    _say(f"{request_id} is cancelled")


@app.command()
def priority(
    request_id: RequestId,
    level: Annotated[str, typer.Argument(help="Class name, or a level -100..100 (low = urgent).")],
    target: Target = DEFAULT_TARGET,
    control: Control = None,
) -> None:
    """Change a request's priority, free of its tenant's cap. For a level below 0 write -- before the ID."""

    async def ask(client: ControlClient) -> int:
        found = await client.find(request_id)
        return await client.set_priority(found.server_request_id, level)

    _say(f"{request_id} has level {run(_with(target, control, ask))}")


@app.command()
def drain(
    target: Target = DEFAULT_TARGET,
    control: Control = None,
    grace: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds the requests are given.", show_default="the server's"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have the server take no more requests and end; the second time it ends at once."""
    if not yes:
        typer.confirm(f"End the server at {control or target}?", abort=True, err=True)
    _show(target, control, lambda client: client.drain(grace), admin_view.drained_line, as_json=as_json)


@app.command()
def decisions(
    target: Target = DEFAULT_TARGET,
    control: Control = None,
    past: Annotated[int, typer.Option(min=0, help="Steps of the past to begin with.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="End after so many steps.", show_default="with Ctrl-C")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Follow what the scheduler decides, a line a step (JSON lines with --json)."""
    console = _console()

    def show(step: Step) -> None:
        if as_json:
            print(json.dumps(dataclasses.asdict(step)), flush=True)  # noqa: T201
        else:
            console.print(admin_view.step_line(step), soft_wrap=True)

    async def follow(client: ControlClient) -> None:
        num_seen = 0
        async for step in client.decisions(past):
            show(step)
            num_seen += 1
            if num_seen == steps:
                return

    run(_with(target, control, follow))


def _show(
    target: str,
    control: str | None,
    ask: Callable[[ControlClient], Awaitable[Any]],
    view: Callable[[Any], RenderableType],
    *,
    as_json: bool,
) -> None:
    answer = run(_with(target, control, ask))
    if as_json:
        print(json.dumps(_plain(answer), indent=2))  # noqa: T201
    else:
        _console().print(view(answer))


async def _with(target: str, control: str | None, ask: Callable[[ControlClient], Awaitable[Any]]) -> Any:
    async with ControlClient.from_environment(control or target) as client:
        return await ask(client)


def _plain(answer: Any) -> Any:
    if isinstance(answer, Sequence):
        return [dataclasses.asdict(entry) for entry in answer]
    return dataclasses.asdict(answer)


def _say(text: str) -> None:
    print(printable(text))  # noqa: T201


def _console() -> Console:
    # A file or pipe has no width of its own, and 80 columns would cut the tables.
    return PlainConsole() if sys.stdout.isatty() else PlainConsole(width=_PLAIN_COLUMNS)
