"""A model in hand-computable arithmetic, without torch.

It ships in the package so that server, clients and command line can be tested in
milliseconds. Its KV is honest: every computed token is written to the slot its
block table names, and the next token is a function of all tokens *read back*
through that table, so a wrong table, a lost block or a missed recomputation
changes the output.
"""

import asyncio
import codecs
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakSet, finalize

from engine.errors import InternalError, VorrangError
from engine.events import PositionLogProbs, PromptLogProbs
from engine.grammar import GrammarSpec
from engine.request import RequestId
from engine.runner.base import ModelInfo, PoolShape
from engine.runner.grammars import constraint
from engine.runner.grammars.byte_compiler import ByteCompiler, allowed_byte
from engine.runner.grammars.constraint import Constrained, Found
from engine.runner.grammars.host import ThreadHost
from engine.runner.grammars.masks import Masks
from engine.runner.inline import on_loop
from engine.scheduler.plan import Grant, Granted, Plan, StepResult
from engine.text import ChatMessage, StreamDecoder

#: One id per byte, then the end token.
EOS_TOKEN_ID = 256
VOCAB_SIZE = 257
_FIRST_PRINTABLE, _NUM_PRINTABLE = 32, 95


def adapter_shift(adapter: str) -> int:
    """What an adapter adds to every token id that is stored: the sum of its name's bytes; 0 without one."""
    return sum(adapter.encode())


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """What the scripted model says after ``token_ids``: a printable ASCII byte.

    ``32 + (sum of (position + 1) * id + 7 * number of ids + seed) mod 95``; never the end token.
    """
    total = sum((position + 1) * token_id for position, token_id in enumerate(token_ids))
    return _FIRST_PRINTABLE + (total + 7 * len(token_ids) + seed) % _NUM_PRINTABLE


def expected_output(
    prompt_token_ids: Sequence[int], num_tokens: int, seed: int = 0, adapter: str = ""
) -> list[int]:
    """The first ``num_tokens`` output tokens after a prompt, undisturbed."""
    token_ids, shift = list(prompt_token_ids), adapter_shift(adapter)
    for _ in range(num_tokens):
        token_ids.append(next_token([token_id + shift for token_id in token_ids], seed))
    return token_ids[len(prompt_token_ids) :]


def scripted_logprobs(token_id: int, num_top: int) -> PositionLogProbs:
    """What the scripted model says of a token: -0.5; the ids after it are the next likeliest, 1 apart."""
    top_ids = tuple((token_id + place) % VOCAB_SIZE for place in range(num_top))
    return PositionLogProbs(token_id, -0.5, top_ids, tuple(-0.5 - place for place in range(num_top)))


class ScriptedRunner:
    """A ``Runner`` whose model is ``next_token`` (greedy), or ``next_token`` + seed (temperature > 0).

    Of sampling parameters it knows ``seed``, ``logprobs`` and ``prompt_logprobs``; what would change
    logits means nothing where there are none. Under a grammar, of which it knows choices alone, it says
    the first allowed id from ``next_token`` on, going round after the last one.
    An adapter shifts the ids that are stored.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        context_tokens: longest prompt + output.
        step_s: time a step takes, in seconds; 0 = one turn of the event loop.
        adapters: names of its adapters.
    """

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        context_tokens: int = 2048,
        step_s: float = 0.0,
        adapters: Sequence[str] = (),
    ) -> None:
        eos = frozenset({EOS_TOKEN_ID})
        self._info = ModelInfo(
            "scripted", "Scripted", VOCAB_SIZE, context_tokens, eos, adapters=tuple(adapters)
        )
        self._pool = PoolShape(num_blocks, block_size)
        self._slots: list[int | None] = [None] * (num_blocks * block_size)
        self._step_s = step_s
        self._sampled: dict[RequestId, int] = {}
        self._last: asyncio.Future[StepResult] | None = None
        self._free_at = 0.0
        self.masks = Masks(ThreadHost(ByteCompiler, VOCAB_SIZE))
        #: Seconds that a step waits for what a grammar allows.
        self.mask_wait_s = 5.0
        self._followed: WeakSet[Granted] = WeakSet()

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        return self._pool

    async def execute(self, plan: Plan) -> StepResult:
        """Compute a plan.

        Cancellation: at once; nothing is in flight while it waits.
        """
        await self.pass_time(self._step_s)
        return self.run(plan)

    def submit(self, plan: Plan) -> asyncio.Future[StepResult]:
        """Hand in a plan; see ``PipelinedRunner``.

        Cancellation of the future: at once; the plan is not computed.
        """
        loop = asyncio.get_running_loop()
        # The time of a step begins when the one before it is over, whatever the event loop does meanwhile.
        self._free_at = max(loop.time(), self._free_at) + self._step_s
        self._last = loop.create_task(self._in_turn(self._last, plan, self._free_at))
        return self._last

    async def _in_turn(
        self, before: asyncio.Future[StepResult] | None, plan: Plan, done_at: float
    ) -> StepResult:
        if before is not None:
            await asyncio.wait([before])
        await self.pass_time(max(0.0, done_at - asyncio.get_running_loop().time()))
        return self.run(plan)

    async def pass_time(self, time_s: float) -> None:
        """Let the time of a step pass; tests may make more of it."""
        await asyncio.sleep(time_s)

    def watch_masks(self, ready: Callable[[Sequence[tuple[RequestId, int]]], None]) -> None:
        """See ``ConstrainingRunner``."""
        self.masks.watch(on_loop(ready))

    async def prepare(self, grammar: GrammarSpec, level: int = 0) -> None:
        """See ``ConstrainingRunner``."""
        await asyncio.wrap_future(self.masks.prepare(grammar, level))

    async def close(self) -> None:
        """End the threads that compile grammars."""
        self.masks.close()

    def run(self, plan: Plan) -> StepResult:
        """Compute a plan on the spot. A request fails alone when it reads a slot nobody has written."""
        before, self._sampled = self._sampled, {}
        for grant in plan.grants:
            self._write(grant, before)
        failures: dict[RequestId, VorrangError] = {}
        after_drafts: dict[RequestId, list[int]] = {}
        void = frozenset(
            grant.request_id
            for grant in plan.grants
            if grant.sampling.grammar is not None
            and grant.has_unknown_token
            and grant.request_id not in before
        )
        said: dict[RequestId, list[int]] = {}
        rows: list[Constrained] = []
        for grant in plan.grants:
            if grant.output_index is None or grant.request_id in void:
                continue
            try:
                reads = [self._read(grant, grant.num_drafts - n) for n in range(grant.num_drafts + 1)]
            except VorrangError as error:
                failures[grant.request_id] = error
                continue
            seed = grant.sampling.seed if grant.sampling.temperature > 0 else 0
            said[grant.request_id] = [next_token(read, seed) for read in reads]
            if grant.sampling.grammar is not None:
                rows.append(self._constrained(grant, reads[0]))
        found = constraint.find(rows, self.masks, self.mask_wait_s, VOCAB_SIZE) if rows else Found()
        failures.update(found.failures)
        masks = {row.request.request_id: found.masks[row.row] for row in rows if row.row in found.masks}
        silent = found.silent
        for request_id, (token_id, *others) in said.items():
            if request_id in silent:
                continue
            mask = masks.get(request_id)
            self._sampled[request_id] = token_id if mask is None else allowed_byte(mask, token_id)
            if others:
                after_drafts[request_id] = others
        return StepResult(
            self._sampled,
            failures,
            {
                grant.request_id: scripted_logprobs(self._sampled[grant.request_id], grant.sampling.logprobs)
                for grant in plan.grants
                if grant.sampling.logprobs is not None and grant.request_id in self._sampled
            },
            {scored.request_id: scored for grant in plan.grants if (scored := _scored(grant)) is not None},
            frozenset(found.complete),
            after_drafts,
            sat_out=void | found.sat_out,
            awaiting=constraint.go_on(rows, self._sampled, silent | void, self.masks),
        )

    def _constrained(self, grant: Grant, read: Sequence[int]) -> Constrained:
        request, shift = grant.request, adapter_shift(grant.request.adapter)
        grammar = request.sampling.grammar
        assert grammar is not None
        output = [token_id - shift for token_id in read[request.num_prompt_tokens :]]
        if request not in self._followed:
            self._followed.add(request)
            finalize(request, self.masks.forget, request.request_id).atexit = False
        followed = self.masks.follow(request.request_id, grammar, output)
        return Constrained(id(request), request, followed, output, sorted(grant.banned_token_ids))

    def _slot(self, block_table: Sequence[int], position: int) -> int:
        block, offset = divmod(position, self._pool.block_size)
        return block_table[block] * self._pool.block_size + offset

    def _write(self, grant: Grant, before: Mapping[RequestId, int]) -> None:
        token_ids = list(grant.token_ids)
        if len(token_ids) < grant.num_tokens:  # the step before has sampled it, unless that failed
            token_ids.append(before.get(grant.request_id, EOS_TOKEN_ID))
        shift = adapter_shift(grant.request.adapter)
        for position, token_id in enumerate(token_ids, start=grant.start):
            self._slots[self._slot(grant.block_table, position)] = token_id + shift

    def _read(self, grant: Grant, num_later: int) -> list[int]:
        num_tokens = grant.start + grant.num_tokens - num_later
        read = [self._slots[self._slot(grant.block_table, position)] for position in range(num_tokens)]
        token_ids = [token_id for token_id in read if token_id is not None]
        if len(token_ids) < num_tokens:
            raise InternalError("unwritten-slot")
        return token_ids


def _scored(grant: Grant) -> PromptLogProbs | None:
    request, num_top, first = grant.request, grant.sampling.prompt_logprobs, grant.start + 1
    if num_top is None or first >= request.num_prompt_tokens:
        return None
    end = min(first + grant.num_tokens, request.num_prompt_tokens)
    positions = [scripted_logprobs(token_id, num_top) for token_id in request.token_ids[first:end]]
    return PromptLogProbs(grant.request_id, first, tuple(positions))


class ScriptedTokenizer:
    """Bytes of UTF-8 as ids; id 256 ends an output and has no text."""

    has_chat_template = True
    max_token_bytes = 1

    def encode(self, text: str) -> list[int]:
        """Bytes of the text."""
        return list(text.encode())

    def encode_plain(self, text: str) -> list[int]:
        """Bytes of the text."""
        return self.encode(text)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools_json: str = "",
        check_text: Callable[[str], object] | None = None,
    ) -> list[int]:
        """``role: content`` a line, then ``assistant: `` when asked for."""
        text = "".join(f"{message.role}: {message.content}\n" for message in messages)
        whole = tools_json + text + ("assistant: " if add_generation_prompt else "")
        if check_text is not None:
            check_text(whole)
        return self.encode(whole)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of bytes; the end token reads ``<end>`` unless skipped."""
        end = b"" if skip_special_tokens else b"<end>"
        return b"".join(bytes([i]) if i < EOS_TOKEN_ID else end for i in token_ids).decode(errors="replace")

    def stream_decoder(self, prompt_token_ids: Sequence[int]) -> StreamDecoder:
        """A decoder that holds back incomplete characters."""
        return _ByteDecoder()


class _ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < EOS_TOKEN_ID else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
