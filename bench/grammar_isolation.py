"""What a costly grammar at level 100 costs an interactive stream at level -100.

    PYTHONPATH=.:protos python bench/grammar_isolation.py

Starts a server with the default model; prints gaps between the tokens of a stream, in milliseconds,
undisturbed and beside one request with each of the grammars, and how that request ended.
"""

# ruff: noqa: ANN001, ANN201, ANN202, D103, T201
import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from clients.python import VorrangClient
from clients.python.errors import VorrangError
from tests.support.process import server_process

NESTED_STARS = "(" * 20 + "a" + "*)" * 20
REGEXES = {
    "20 nested stars": NESTED_STARS,
    "(a|aa)*": "(a|aa|aaa)*" * 8,
    "counted": ".{0,500}x",
    "optional": "(?:a?){200}",
    "nested counts": "((a{1,30}){1,30}){1,30}",
}


async def gaps_of(client, num_tokens):
    """Milliseconds between the tokens of an interactive stream."""
    found, last = [], None
    async with client.session() as session:
        request = await session.start(
            "Tell me a story.", max_tokens=num_tokens, priority=-100, ignore_eos=True
        )
        async for _ in request:
            now = time.perf_counter()
            if last is not None:
                found.append((now - last) * 1000)
            last = now
    return found


def shown(name, gaps, how=""):
    longest = max(gaps)
    print(f"{name:18} median {statistics.median(gaps):6.1f}  longest {longest:6.1f}  {how}", flush=True)


async def main(num_tokens, num_threads, names):
    with (
        tempfile.TemporaryDirectory() as folder,
        server_process("--threads", str(num_threads), log=Path(folder) / "log", model=None) as server,
    ):
        async with VorrangClient(server.address) as client:
            await gaps_of(client, 20)
            for name, regex in REGEXES.items():
                if names and name not in names:
                    continue
                shown("undisturbed", await gaps_of(client, num_tokens))

                async def disturb(regex=regex):
                    try:
                        answer = await client.generate(
                            "aaaa", regex=regex, priority=100, max_tokens=150, logit_bias={}, ignore_eos=True
                        )
                    except VorrangError as error:
                        return f"failed: {error}"
                    return f"{len(answer.token_ids)} tokens"

                task = asyncio.create_task(disturb())
                gaps = await gaps_of(client, num_tokens)
                if not task.done():
                    task.cancel()
                how = (await asyncio.gather(task, return_exceptions=True))[0]
                shown(name, gaps, str(how)[:100])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    asyncio.run(main(options.tokens, options.threads, options.only))
