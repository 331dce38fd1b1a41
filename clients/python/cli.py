"""``vorrangctl``: the command line of the client. Exit codes: see ``command``."""

import getpass
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from clients.python import admin
from clients.python.auth import hash_token
from clients.python.bench_cli import bench
from clients.python.chat import Conversation, converse
from clients.python.command import DEFAULT_TARGET, EXIT_FAILED, Adapter, Target, expected_failures, run
from clients.python.demo import DemoOptions, run_demo
from clients.python.explain import print_explanation
from clients.python.generate import write_generated
from clients.python.load_cli import load
from clients.python.request import RequestOptions
from clients.python.top import top
from clients.python.watch import write_trace
from timeline.console import PlainConsole

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
    adapter: Adapter = "",
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt as a user's message.")] = False,
    system: Annotated[str, typer.Option(help="System message; implies --chat.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest output, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 = greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling mass.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Likeliest tokens kept; 0 = all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the likeliest one's probability.")
    ] = None,
    typical_p: Annotated[float | None, typer.Option(help="Mass of typical sampling.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Factor against tokens of prompt and output; 1 = off.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Subtracted for tokens of the output, -2..2.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Subtracted for each time they came, -2..2.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID:BIAS, added to a token's logit; repeatable.")
    ] = None,
    allow: Annotated[
        list[int] | None, typer.Option(help="Id of a token that may be sampled, no other; repeatable.")
    ] = None,
    ban: Annotated[
        list[int] | None, typer.Option(help="Id of a token that is never sampled; repeatable.")
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Word that is never said; repeatable.")] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="Shortest output, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the output; repeatable.")] = None,
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="Outputs; several are shown at the end.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Show each token's log probability and so many likeliest.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(min=0, help="The same for the tokens of the prompt.")
    ] = None,
    json_schema: Annotated[
        typer.FileText | None, typer.Option(help="File with a JSON schema that the output obeys; - = input.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Expression that the whole output matches.")] = None,
    ebnf: Annotated[
        typer.FileText | None, typer.Option(help="File with a grammar that the output obeys.")
    ] = None,
    choice: Annotated[list[str] | None, typer.Option(help="An answer that may be given; repeatable.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0.0, help="Deadline in seconds.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say when it waits and goes on.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the whole result as one JSON object.")
    ] = False,
) -> None:
    """Generate text; it streams to standard output, what it cost goes to standard error.

    Log probabilities go there too, one JSON object a token.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    chosen: dict[str, Any] = {
        "priority": priority,
        "adapter": adapter,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": dict(map(_bias, logit_bias)) if logit_bias else None,
        "allowed_token_ids": allow,
        "banned_token_ids": ban,
        "bad_words": bad_word,
        "min_tokens": min_tokens,
        "seed": seed,
        "stop": stop,
        "n": n,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "json_schema": json_schema.read() if json_schema is not None else None,
        "regex": regex,
        "ebnf": ebnf.read() if ebnf is not None else None,
        "choice": choice,
    }
    if sum(chosen[name] is not None for name in ("json_schema", "regex", "ebnf", "choice")) > 1:
        raise typer.BadParameter("give at most one of --json-schema, --regex, --ebnf and --choice")
    options = RequestOptions(label="vorrangctl generate")
    options.update({name: value for name, value in chosen.items() if value is not None})  # type: ignore[typeddict-item]
    if chat or system:
        turns = [{"role": "system", "content": system}] if system else []
        options["messages"] = [*turns, {"role": "user", "content": prompt}]
    plain = None if "messages" in options else prompt
    run(write_generated(target, plain, options, timeout, verbose=verbose, as_json=as_json))


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias must be ID:BIAS, got {text!r}") from None


@main.command()
def chat(
    target: Target = DEFAULT_TARGET,
    priority: Annotated[str, typer.Option(help="Class name or level of the answers.")] = "interactive",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.7,
    adapter: Adapter = "",
) -> None:
    """Chat in the terminal and see when an answer waits, is preempted and goes on."""
    conversation = Conversation(
        system=system, priority=priority, max_tokens=max_tokens, temperature=temperature, adapter=adapter
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
    decisions: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the servers' decision logs there, for `vorrang trace`."),
    ] = None,
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
            decisions=decisions,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # A file or pipe has no width of its own, and 80 columns would cut the tables.
    held = run(run_demo(options, PlainConsole() if sys.stdout.isatty() else PlainConsole(width=100)))
    raise typer.Exit(0 if held else EXIT_FAILED)


@main.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="The server's id of a request, or its client's.")],
    target: Target = DEFAULT_TARGET,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON.")] = False,
) -> None:
    """Tell where the time of a request went: what it waited for, who overtook it, what that cost."""
    console = PlainConsole() if sys.stdout.isatty() else PlainConsole(width=110)
    run(print_explanation(target, request_id, as_json=as_json, console=console))


@main.command()
def trace(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to watch.")] = 10.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Trace to write; open it at ui.perfetto.dev.")
    ] = None,
    image: Annotated[Path | None, typer.Option(help="PNG or SVG to draw (needs vorrang[report]).")] = None,
    every_step: Annotated[bool, typer.Option(help="A slice for each decode, not for many at once.")] = False,
    target: Target = DEFAULT_TARGET,
) -> None:
    """Watch a server for a while and write a timeline: who sat where, who waited, who gave way to whom."""
    print(run(write_trace(target, seconds, output, image, every_step=every_step)))  # noqa: T201


@auth_app.command("hash-token")
def auth_hash_token() -> None:
    """Read a bearer token from standard input, or ask for it, and print its hash for a server's settings."""
    token = getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.read()
    with expected_failures():
        print(hash_token(token.rstrip("\r\n")))  # noqa: T201


if __name__ == "__main__":
    main()
