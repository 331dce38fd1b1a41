"""Drives any OpenAI-compatible streaming server with a workload, to compare it with Vorrang.

The same workload, the same open loop and the same records as for Vorrang itself: every
request starts at its intended time, however slow the others are, and every latency is
measured from there. Prompts go to ``/v1/completions`` as token ids, which vLLM and SGLang
take, or as words. Needs the extra ``openai``.

Servers stream pieces, not tokens. A piece with text counts as one token while it
streams; the number of tokens a request got is corrected by the server's own usage at the
end, where it sends one.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workloads.arrivals import Arrival, Workload
from workloads.records import RequestRecord, Run

if TYPE_CHECKING:
    import httpx2

_CONNECTIONS_MAX = 4096
_ERROR_BYTES_MAX = 500
_FINISH_REASONS = {"stop": "stop", "length": "length"}


class ExtraMissing(Exception):
    """The optional package that this needs is not installed."""


@dataclass(frozen=True, slots=True)
class OpenAiTarget:
    """A server and how it wants to be asked.

    Attributes:
        url: base address, such as ``http://127.0.0.1:8000``; ``/v1/completions`` is added.
        model: name of the model it serves.
        api_key: sent as a bearer token; empty: none.
        prompts: ``tokens`` or ``words``; words are about one token each.
        vocab_size: prompts of token ids stay below it.
        send_level: send the level as ``priority``, which vLLM reads when it runs with a priority policy.
        extra_body: put into every request as it is. ``ignore_eos`` makes outputs as long as the workload
            says; a server that does not know it may refuse it.
        timeout_s: longest wait for the next piece of an answer.
    """

    url: str
    model: str
    api_key: str = ""
    prompts: str = "tokens"
    vocab_size: int = 32_000
    send_level: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    timeout_s: float = 120.0

    def body(self, request: Arrival) -> dict[str, Any]:
        """What is asked of the server for one request."""
        ids = request.prompt_token_ids(self.vocab_size)
        prompt: object = list(ids) if self.prompts == "tokens" else " ".join(f"w{i % 1000}" for i in ids)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.send_level:
            body["priority"] = request.level
        return body | dict(self.extra_body)


async def run_openai_load(
    target: OpenAiTarget,
    workload: Workload,
    *,
    name: str = "openai",
    clock: Callable[[], float] = time.perf_counter,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> Run:
    """Run a workload against a server.

    Cancelled: requests that are still running are dropped, and the error goes on.

    Args:
        target: the server.
        workload: what arrives, and when.
        name: of the run, for the report.
        clock: seconds; its 0 does not matter.
        on_record: told of every request that has ended.

    Returns:
        A record for every request, refused and failed ones too.

    Raises:
        ExtraMissing: the extra ``openai`` is not installed.
    """
    try:
        import httpx2
    except ImportError:
        raise ExtraMissing(
            "OpenAI-compatible servers need the extra: pip install 'vorrang[openai]'"
        ) from None

    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx2.Limits(max_connections=_CONNECTIONS_MAX, max_keepalive_connections=_CONNECTIONS_MAX)
    timeout = httpx2.Timeout(target.timeout_s)
    run = Run(name=name, workload=workload.name, server=f"{target.url} {target.model}")
    begin_s = clock()

    def now_s() -> float:
        return clock() - begin_s

    async with (
        httpx2.AsyncClient(base_url=target.url, headers=headers, limits=limits, timeout=timeout) as client,
        asyncio.TaskGroup() as group,
    ):
        for request in workload.requests:
            if (wait_s := request.arrival_s - now_s()) > 0:
                await asyncio.sleep(wait_s)
            record = RequestRecord(request)
            run.records.append(record)
            group.create_task(_ask(client, target, record, now_s, on_record))
    run.end_s = now_s()
    return run


async def _ask(
    client: "httpx2.AsyncClient",
    target: OpenAiTarget,
    record: RequestRecord,
    now_s: Callable[[], float],
    on_record: Callable[[RequestRecord], None] | None,
) -> None:
    """One request; whatever goes wrong with it is written into its record."""
    import httpx2

    record.sent_s = now_s()
    try:
        async with client.stream("POST", "/v1/completions", json=target.body(record.request)) as response:
            if response.status_code != httpx2.codes.OK:
                text = (await response.aread())[:_ERROR_BYTES_MAX].decode(errors="replace")
                record.error, record.error_message = f"HTTP_{response.status_code}", text
                return
            record.accepted_s = now_s()
            await _read(response.aiter_lines(), record, now_s)
            if record.reason is None and record.error is None:
                record.error, record.error_message = "CUT", "the answer ended without a finish_reason"
    except httpx2.HTTPError as error:
        record.error, record.error_message = type(error).__name__, str(error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        record.error, record.error_message = "MALFORMED", f"not an event stream: {error!r}"
    finally:
        record.ended_s = now_s()
        if on_record is not None:
            on_record(record)


async def _read(lines: AsyncIterator[str], record: RequestRecord, now_s: Callable[[], float]) -> None:
    """Read server-sent events into a record."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if error := event.get("error"):
            record.error, record.error_message = "SERVER_ERROR", str(error)[:_ERROR_BYTES_MAX]
            return
        for choice in event.get("choices") or ():
            if choice.get("text"):
                now = now_s()
                record.got_tokens(1, now)
                record.token_times_s.append(now)
            if finish := choice.get("finish_reason"):
                record.reason = _FINISH_REASONS.get(finish, finish)
        if usage := event.get("usage"):
            record.num_output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            record.num_cached_tokens = details.get("cached_tokens") or 0
