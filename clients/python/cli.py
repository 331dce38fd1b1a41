"""``vorrangctl``: the command line of the client.

Exit codes: 0 success, 1 the request, the server or the demo failed, 2 wrong
usage or a refused field, 130 Ctrl-C.
"""

import asyncio
import getpass
import json
import os
import sys
from collections.abc import Coroutine, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from clients.python.auth import hash_token
from clients.python.chat import Conversation, converse
from clients.python.client import VorrangClient
from clients.python.demo import DemoOptions, run_demo
from clients.python.demo_server import ServerDied
from clients.python.errors import InvalidRequest, VorrangError
from clients.python.events import Delta, Result
from clients.python.request import RequestOptions

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

main = typer.Typer(
    name="vorrangctl",
    help="Talk to a Vorrang server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

auth_app = typer.Typer(help="Bearer tokens.", no_args_is_help=True)
main.add_typer(auth_app, name="auth")

Target = Annotated[
    str, typer.Option("--target", envvar="VORRANG_TARGET", help="Address of the server, as HOST:PORT.")
]
DEFAULT_TARGET = "127.0.0.1:50051"
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
    timeout: Annotated[float | None, typer.Option(min=0.0, help="Deadline in seconds.")] = None,
) -> None:
    """Generate text; it streams to standard output, what it cost goes to standard error.

    Log probabilities go there too, one JSON object a token.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    chosen: dict[str, Any] = {
        "priority": priority,
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
    }
    options = RequestOptions(label="vorrangctl generate")
    options.update({name: value for name, value in chosen.items() if value is not None})  # type: ignore[typeddict-item]
    if chat or system:
        turns = [{"role": "system", "content": system}] if system else []
        options["messages"] = [*turns, {"role": "user", "content": prompt}]
    _run(_generate(target, None if "messages" in options else prompt, options, timeout))


async def _generate(
    target: str, prompt: str | None, options: RequestOptions, timeout_s: float | None
) -> None:
    async with (
        VorrangClient.from_environment(target) as client,
        client.generate_stream(prompt, timeout_s=timeout_s, **options) as stream,
    ):
        is_only = options.get("n", 1) == 1
        async for event in stream:
            if isinstance(event, Delta) and is_only:
                sys.stdout.write(event.text)
                sys.stdout.flush()
        result = await stream.result()
        if not is_only:
            texts = (f"--- {index}\n{output.text}" for index, output in enumerate(result.outputs))
            sys.stdout.write("\n".join(texts))
        sys.stdout.write("\n")
        sys.stdout.flush()
        for line in logprob_lines(result):
            sys.stderr.write(f"{line}\n")
        sys.stderr.write(f"{usage_line(result)}\n")


def logprob_lines(result: Result) -> Iterator[str]:
    """Log probabilities of the prompt and of each output, a JSON object a token."""
    parts = [("prompt", result.prompt_logprobs)]
    parts += [(f"output {index}", output.logprobs) for index, output in enumerate(result.outputs)]
    for part, positions in parts:
        for position in positions:
            sampled = position.sampled
            top = {entry.token_id: round(entry.logprob, 4) for entry in position.top}
            yield json.dumps(
                {"of": part, "token": sampled.token_id, "logprob": round(sampled.logprob, 4), "top": top}
            )


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias must be ID:BIAS, got {text!r}") from None


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
    with _expected_failures():
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
    held = _run(run_demo(options, Console() if sys.stdout.isatty() else Console(width=100)))
    raise typer.Exit(0 if held else EXIT_FAILED)


@auth_app.command("hash-token")
def auth_hash_token() -> None:
    """Read a bearer token from standard input, or ask for it, and print its hash for a server's settings."""
    token = getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.read()
    with _expected_failures():
        print(hash_token(token.rstrip("\r\n")))  # noqa: T201


class _expected_failures:  # noqa: N801  # Reads as a statement where it is used.
    """Turns failures a user must expect into one line and an exit code."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        match error:
            case InvalidRequest():
                details = [f"{v.field}: {v.description}" for v in error.violations]
                _exit("; ".join(details) or str(error), EXIT_USAGE, error)
            case VorrangError() | ServerDied():
                _exit(str(error), EXIT_FAILED, error)
            case TimeoutError():
                _exit("took too long", EXIT_FAILED, error)
            case ValueError():
                _exit(str(error), EXIT_USAGE, error)
            case BrokenPipeError():
                # Whoever read the output has gone; keep the interpreter from trying again at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(EXIT_FAILED) from error
            case KeyboardInterrupt():
                _exit("interrupted", EXIT_INTERRUPTED, error)
            case asyncio.CancelledError():
                _exit("terminated", EXIT_TERMINATED, error)


def _exit(message: str, code: int, error: BaseException) -> None:
    sys.stderr.write(f"vorrangctl: {message}\n")
    raise typer.Exit(code) from error


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run ``work`` to its end; Ctrl-C cancels it, which cancels its requests on the server."""
    with _expected_failures():
        return asyncio.run(work)


if __name__ == "__main__":
    main()
