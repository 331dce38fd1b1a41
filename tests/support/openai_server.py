"""A small OpenAI-compatible server on loopback: streams a word every few milliseconds."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

#: Asked for as ``max_tokens``, they make the server misbehave.
REFUSE, CUT, GARBAGE, FAIL = 1001, 1002, 1003, 1004


class OpenAiServer:
    """Answers ``POST /v1/completions``; keeps the bodies it was sent."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self._streams: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, many requests."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lengths = [
                    line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                ]
                body = json.loads(await reader.readexactly(int(lengths[0].split(b":")[1])))
                self.bodies.append(body)
                await self.answer(body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._streams.discard(task)
            writer.close()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Chunked events, or what a magic length asks for."""
        num_tokens = body["max_tokens"]
        if num_tokens == REFUSE:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy")
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

        def send(data: str) -> None:
            payload = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(payload), payload))

        if num_tokens == FAIL:
            send(json.dumps({"error": {"message": "out of memory"}}))
        elif num_tokens == GARBAGE:
            send("{no json")
        else:
            for index in range(min(num_tokens, 1000)):
                await asyncio.sleep(self.step_s)
                reason = "length" if index == num_tokens - 1 else None
                send(json.dumps({"choices": [{"text": f" w{index}", "finish_reason": reason}]}))
                await writer.drain()
                if num_tokens == CUT and index == 2:
                    raise ConnectionResetError
            details = {"cached_tokens": 3}
            usage = {"completion_tokens": num_tokens, "prompt_tokens_details": details}
            send(json.dumps({"choices": [], "usage": usage}))
            send("[DONE]")
        writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def openai_server(step_s: float = 0.002) -> AsyncIterator[OpenAiServer]:
    """Such a server, for as long as the context lasts."""
    server = OpenAiServer(step_s)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        listening.close()
        for task in list(server._streams):
            task.cancel()
        await asyncio.gather(*server._streams, return_exceptions=True)
