"""``vorrangctl``: the command line of the client. Exit codes: see ``command``."""

import getpass
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from clients.python import admin
from clients.python.auth import hash_token
from clients.python.bench_cli import bench
from clients.python.chat import Conversation, converse
from clients.python.client import VorrangClient
from clients.python.command import DEFAULT_TARGET, EXIT_FAILED, Target, expected_failures, run
from clients.python.demo import DemoOptions, run_demo
from clients.python.events import Delta, Result
from clients.python.load_cli import load
from clients.python.request import RequestOptions
from clients.python.top import top

main = typer.Typer(
    name="vorrangctl",
    help="Talk to a Vorrang server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

auth_app = typer.Typer(help="Bearer tokens.", no_args_is_help=True)
main.add_typer(auth_app, name="auth")
main.add_typer(admin.app)
main.command()(top)
main.command()(load)
main.command()(bench)

PriorityName = Annotated[
    str | None,
    typer.Option("--priority", help="interactive, standard, batch or a level -100..100 (low = urgent)."),
]


@main.callback()
def _root() -> None:
    """Talk to a Vorrang server.

    VORRANG_TOKEN holds a bearer token, VORRANG_CA names a PEM file with the server's authority (TLS),
    VORRANG_CERTIFICATE and VORRANG_KEY name the client's own certificate (mTLS).
    """


@main.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    target: Target = DEFAULT_TARGET,
    priority: PriorityName = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt as a user's message.")] = False,
    system: Annotated[str, typer.Option(help="System message; implies --chat.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest output, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 = greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling mass.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Likeliest tokens kept; 0 = all.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the output; repeatable.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0.0, help="Deadline in seconds.")] = None,
) -> None:
    """Generate text; it streams to standard output, what it cost goes to standard error."""
    if prompt == "-":
        prompt = sys.stdin.read()
    chosen: dict[str, Any] = {
        "priority": priority,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
    }
    options = RequestOptions(label="vorrangctl generate")
    options.update({name: value for name, value in chosen.items() if value is not None})  # type: ignore[typeddict-item]
    if chat or system:
        turns = [{"role": "system", "content": system}] if system else []
        options["messages"] = [*turns, {"role": "user", "content": prompt}]
    run(_generate(target, None if "messages" in options else prompt, options, timeout))


async def _generate(
    target: str, prompt: str | None, options: RequestOptions, timeout_s: float | None
) -> None:
    async with (
        VorrangClient.from_environment(target) as client,
        client.generate_stream(prompt, timeout_s=timeout_s, **options) as stream,
    ):
        async for event in stream:
            if isinstance(event, Delta):
                sys.stdout.write(event.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        sys.stderr.write(f"{usage_line(await stream.result())}\n")


def usage_line(result: Result) -> str:
    """What a request has cost, on one line."""
    usage = result.usage
    parts = [
        f"{usage.output_tokens} tokens, {result.finish_reason}",
        f"prompt {usage.prompt_tokens} ({usage.cached_tokens} cached)",
    ]
    if result.accepted is not None:
        parts.append(f"level {result.accepted.level}")
    if result.ttft_s is not None:
        parts.append(f"TTFT {result.ttft_s:.3f} s")
    if result.tpot_s is not None:
        parts.append(f"{result.tpot_s * 1000:.1f} ms/token")
    if usage.preemptions:
        parts.append(f"preempted {usage.preemptions}x, {usage.recomputed_tokens} tokens recomputed")
    return " | ".join(parts)


@main.command()
def chat(
    target: Target = DEFAULT_TARGET,
    priority: Annotated[str, typer.Option(help="Class name or level of the answers.")] = "interactive",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.7,
) -> None:
    """Chat in the terminal and see when an answer waits, is preempted and goes on."""
    conversation = Conversation(
        system=system, priority=priority, max_tokens=max_tokens, temperature=temperature
    )
    with expected_failures():
        converse(target, conversation)


@main.command()
def demo(
    batch: Annotated[int, typer.Option(min=1, help="Long batch requests; at least as many as seats.")] = 10,
    interactive: Annotated[int, typer.Option(min=1, help="Short interactive requests.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest output of a batch request.")] = 128,
    seats: Annotated[int, typer.Option(min=1, help="Seats of the server.")] = 4,
    gap: Annotated[int, typer.Option(min=0, help="Batch output tokens between interactive requests.")] = 160,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the server.")] = None,
    kv_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks of the server.")] = None,
) -> None:
    """Start a server and watch urgent requests overtake; then the same without priorities.

    Exits with 0 only if every stream finished, preemption happened, no output was changed by it, and
    interactive requests saw their first token at least ten times sooner.
    """
    try:
        options = DemoOptions(
            num_batch=batch,
            num_interactive=interactive,
            num_seats=seats,
            batch_tokens=max_tokens,
            gap_tokens=gap,
            num_threads=threads,
            num_kv_blocks=kv_blocks,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # A file or pipe has no width of its own, and 80 columns would cut the tables.
    held = run(run_demo(options, Console() if sys.stdout.isatty() else Console(width=100)))
    raise typer.Exit(0 if held else EXIT_FAILED)


@auth_app.command("hash-token")
def auth_hash_token() -> None:
    """Read a bearer token from standard input, or ask for it, and print its hash for a server's settings."""
    token = getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.read()
    with expected_failures():
        print(hash_token(token.rstrip("\r\n")))  # noqa: T201


if __name__ == "__main__":
    main()
