"""What operators see, as tables. Knows no server and no terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from clients.python.admin_types import Drained, LiveRequest, ServerInfo, ServerLoad, Step
from timeline.printable import printable
from workloads.classes import class_of

STYLE_BY_CLASS = {"interactive": "bold yellow", "standard": "cyan", "batch": "blue"}
STYLE_BY_STATE = {
    "WAITING": "dim",
    "PREFILL": "green",
    "DECODE": "bold green",
    "PREEMPTED": "bold white on red",
    "PARKED": "magenta",
}


def info_table(info: ServerInfo) -> Table:
    """The server's description, a line each."""
    table = _plain_table()
    for name, value in (
        ("version", info.version),
        ("model", info.model),
        ("policy", f"{info.policy}, steps are filled {info.discipline}"),
        ("started", info.started_at),
        ("seats", info.max_running_requests),
        ("tokens a step", info.max_step_tokens),
        ("KV pool", f"{info.num_blocks} blocks of {info.block_size} tokens"),
        ("longest request", f"{info.limits.max_request_tokens} tokens"),
        ("requests a session", info.limits.max_session_requests),
    ):
        table.add_row(name, plain(str(value)))
    return table


def load_table(load: ServerLoad) -> Table:
    """By class, and the rest as caption."""
    seats = f"{load.num_seats - load.num_free_seats} of {load.num_seats} seats"
    blocks = f"{load.num_blocks - load.num_free_blocks} of {load.num_blocks} KV blocks ({load.kv_use:.0%})"
    since = (
        f"{load.num_steps} steps, the last took {1000 * load.last_step_s:.1f} ms; {load.num_output_tokens} "
        f"tokens produced, {load.num_computed_tokens} computed; {load.num_preemptions} preemptions"
    )
    table = Table(
        title=f"{seats}, {blocks}" + ("; DRAINING" if load.draining else ""),
        caption=since,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("class")
    for heading in ("running", "waiting", "preempted", "parked"):
        table.add_column(heading, justify="right")
    for one in load.classes:
        counts = (one.num_running, one.num_waiting, one.num_preempted, one.num_parked)
        table.add_row(
            Text(printable(one.class_name), STYLE_BY_CLASS.get(one.class_name, "")), *map(str, counts)
        )
    return table


def requests_table(requests: Sequence[LiveRequest]) -> Table:
    """Requests that are alive, a row each."""
    table = Table(caption=f"{len(requests)} alive", caption_justify="left")
    table.add_column("id", no_wrap=True)
    table.add_column("client's id", overflow="fold")
    table.add_column("tenant")
    table.add_column("level", justify="right")
    table.add_column("state")
    for heading in ("prompt", "output", "age", "preempted", "blocks"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("label")
    for request in requests:
        table.add_row(
            plain(request.server_request_id),
            plain(request.request_id),
            plain(request.tenant),
            Text(str(request.level), STYLE_BY_CLASS[class_of(request.level)]),
            state_text(request),
            str(request.usage.prompt_tokens),
            output_of(request),
            age_of(request),
            f"{request.usage.preemptions}x" if request.usage.preemptions else "",
            str(request.num_blocks or ""),
            plain(request.label),
        )
    return table


def plain(text: str) -> Text:
    """Text that somebody else chose, as it is: no markup, and control characters as escapes."""
    return Text(printable(text))


def state_text(request: LiveRequest) -> Text:
    """Where a request stands."""
    starved = " (starved)" if request.starved else ""
    return Text(printable(request.state.lower()) + starved, STYLE_BY_STATE.get(request.state, ""))


def output_of(request: LiveRequest) -> str:
    """Output tokens so far, and at most."""
    most = f"/{request.max_output_tokens}" if request.max_output_tokens else ""
    return f"{request.usage.output_tokens}{most}"


def age_of(request: LiveRequest) -> str:
    """Time since it arrived."""
    age_s = request.age_s
    if age_s < 60:
        return f"{age_s:.1f} s"
    minutes, seconds = divmod(round(age_s), 60)
    return f"{minutes}:{seconds:02} min"


def drained_line(drained: Drained) -> str:
    """What draining found."""
    return f"draining; {drained.num_running} requests run and {drained.num_waiting} wait"


def step_line(step: Step) -> Text:
    """A step on one line: who was granted how much, who was preempted for whom, what is short."""
    line = Text(f"{step.step:>7}  ", "dim")
    if step.num_lost_steps:
        line.append(f"({step.num_lost_steps} steps not seen) ", "bold red")
    for grant in step.grants:
        line.append(
            f"{printable(grant.server_request_id)}+{grant.num_tokens} ", STYLE_BY_CLASS[class_of(grant.level)]
        )
    for preemption in step.preemptions:
        beneficiary = f" for {preemption.beneficiary_id}" if preemption.beneficiary_id else ""
        lost = f"{preemption.num_blocks} blocks, {preemption.num_lost_tokens} tokens lost"
        text = f" {preemption.server_request_id} preempted{beneficiary}: {preemption.reason}, {lost} "
        line.append(printable(text), "bold white on red")
    gate = f", short of {step.bound_gate}" if step.bound_gate else ""
    gate = printable(gate)
    line.append(f" [{step.num_waiting} wait{gate}; {step.num_free_blocks} blocks free]", "dim")
    return line


def _plain_table() -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    return table
