"""``vorrangctl generate``: one request, whose output is written as it comes.

It is a request of a session, so that a lost connection is found again in the middle of the output.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from clients.python.beside import beside
from clients.python.client import VorrangClient
from clients.python.events import Delta, QueueUpdate, Result
from clients.python.progress import Progress
from clients.python.request import RequestOptions
from clients.python.session import Session
from timeline.printable import printable, printable_lines

_LOOK_S = 0.1


async def write_generated(
    target: str,
    prompt: str | None,
    options: RequestOptions,
    timeout_s: float | None,
    *,
    verbose: bool,
    as_json: bool,
) -> None:
    """Make a request and write its output to standard output, what it cost to standard error.

    Args:
        target: address of the server; credentials come from the environment.
        prompt: plain text; None where the options hold the prompt.
        options: of the request.
        timeout_s: how long it may take, the connection included; None = for ever.
        verbose: say on standard error when it waits and goes on.
        as_json: write the whole result as one JSON object instead of the text.

    Raises:
        TimeoutError: it took longer.
        VorrangError: the server can't be reached, or the request failed.
        ValueError: an option has a value that the wire can't carry.

    Cancellation: cancels the request on the server.
    """
    progress = Progress()
    async with (
        asyncio.timeout(timeout_s),
        VorrangClient.from_environment(target) as client,
        client.session(client_name="vorrangctl generate") as session,
        await session.start(prompt, **options) as stream,
        beside(_tell_losses(session, progress, verbose=verbose)),
    ):
        is_only = options.get("n", 1) == 1
        async for event in stream:
            if verbose and (progress.apply(event) or isinstance(event, QueueUpdate)):
                _tell(progress)
            if isinstance(event, Delta) and is_only and not as_json:
                sys.stdout.write(output_text(event.text))
                sys.stdout.flush()
        _write(await stream.result(), is_only=is_only, as_json=as_json)


def _write(result: Result, *, is_only: bool, as_json: bool) -> None:
    """Write what is not written yet of a result."""
    if as_json:
        sys.stdout.write(json.dumps(asdict(result)))
    elif not is_only:
        texts = (f"--- {index}\n{output_text(output.text)}" for index, output in enumerate(result.outputs))
        sys.stdout.write("\n".join(texts))
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in () if as_json else logprob_lines(result):
        sys.stderr.write(f"{line}\n")
    sys.stderr.write(f"{usage_line(result)}\n")


def output_text(text: str) -> str:
    """What a model said, for standard output: as it is for a file or pipe, harmless for a terminal."""
    return printable_lines(text) if sys.stdout.isatty() else text


async def _tell_losses(session: Session, progress: Progress, *, verbose: bool) -> None:
    """Say when the connection is lost, and when it is there again."""
    while verbose:
        await asyncio.sleep(_LOOK_S)
        if progress.is_cut_off == session.connected:
            progress.is_cut_off = not session.connected
            _tell(progress)


def _tell(progress: Progress) -> None:
    sys.stderr.write(f"[{printable(progress.describe())}]\n")


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
