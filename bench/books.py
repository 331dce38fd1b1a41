"""Accounts of requests as a client sees them on the wire, for soaks that must lose and repeat nothing.

Every frame of every session is booked. What is wrong is kept as a sentence in ``problems``: a sequence that
is not the next one, an event after the end, a gap between tokens, another output than the same question
had before, an accepted request without an end. No client library stands between, since one would put
right, or hide, what is looked for. Knows no sockets.
"""

from collections import Counter
from dataclasses import dataclass, field

from google.rpc import error_details_pb2

from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

TERMINAL = ("finished", "failed")
#: Problems that are kept in words; all are counted.
MAX_PROBLEMS = 50


@dataclass(slots=True)
class Entry:
    """One request.

    Attributes:
        question: what was asked; equal questions must have equal outputs, as far as both go.
        sent_s: when it was sent.
        accepted_s: when it was accepted; None = not yet, or refused.
        end: how it ended, ``STOP`` or ``failed: QUEUE_FULL``; empty = not yet.
        last_sequence: of its last event.
        tokens: output token ids by output index.
        token_times_s: when tokens of the first output arrived.
    """

    question: str
    sent_s: float
    accepted_s: float | None = None
    end: str = ""
    last_sequence: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    token_times_s: list[float] = field(default_factory=list)


class Books:
    """Books of all requests of a run.

    Attributes:
        alive: requests that have not ended.
        ends: how often requests ended in each way.
        num_accepted, num_accepted_ended: requests accepted, and those of them that have ended.
        num_problems, problems: what was wrong.
        events: frames by kind.
    """

    def __init__(self) -> None:
        self.alive: dict[str, Entry] = {}
        self.ends: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.num_accepted = self.num_accepted_ended = self.num_problems = 0
        self.problems: list[str] = []
        self._ended: set[str] = set()
        self._answers: dict[tuple[str, int], tuple[int, ...]] = {}

    def sent(self, request_id: str, question: str, now_s: float) -> Entry:
        """A request was sent for the first time."""
        entry = self.alive[request_id] = Entry(question, now_s)
        return entry

    def got(self, frame: gen.SessionResponse, now_s: float) -> Entry | None:
        """Book an event of a request.

        Returns:
            The request's entry; None for a frame of no request that is known and alive.
        """
        kind = frame.WhichOneof("event") or "unknown"
        self.events[kind] += 1
        if not frame.request_id or kind == "command_rejected":
            return None
        entry = self.alive.get(frame.request_id)
        if entry is None:
            known = "after its end" if frame.request_id in self._ended else "of a request nobody sent"
            self.wrong(frame.request_id, f"{kind} {known}")
            return None
        if frame.sequence != entry.last_sequence + 1:
            self.wrong(frame.request_id, f"{kind} has sequence {frame.sequence} after {entry.last_sequence}")
        entry.last_sequence = frame.sequence
        if kind == "accepted":
            if entry.accepted_s is not None:
                self.wrong(frame.request_id, "accepted twice")
            entry.accepted_s = now_s
            self.num_accepted += 1
        elif kind == "delta" and frame.delta.token_ids:
            self._tokens(frame, entry, now_s)
        elif kind in TERMINAL:
            self._end(frame, entry)
        return entry

    def wrong(self, request_id: str, what: str) -> None:
        """Note a problem."""
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{request_id}: {what}")

    def close(self) -> None:
        """Nothing more comes: whoever is alive was lost."""
        for request_id, entry in self.alive.items():
            said = "accepted" if entry.accepted_s is not None else "never answered"
            self.wrong(request_id, f"{said}, and never ended (last sequence {entry.last_sequence})")
        if self.num_accepted != self.num_accepted_ended:
            self.wrong("all", f"{self.num_accepted} accepted, {self.num_accepted_ended} of them ended")

    def _tokens(self, frame: gen.SessionResponse, entry: Entry, now_s: float) -> None:
        tokens = entry.tokens.setdefault(frame.output_index, [])
        if frame.delta.first_token_index != len(tokens):
            what = f"output {frame.output_index} goes on at token {frame.delta.first_token_index}"
            self.wrong(frame.request_id, f"{what}, {len(tokens)} have come")
        tokens += frame.delta.token_ids
        if frame.output_index == 0:
            entry.token_times_s.append(now_s)

    def _end(self, frame: gen.SessionResponse, entry: Entry) -> None:
        if frame.HasField("finished"):
            entry.end = types.FinishReason.Name(frame.finished.reason).removeprefix("FINISH_REASON_")
            told, came = frame.finished.usage.output_tokens, sum(map(len, entry.tokens.values()))
            if told != came:
                self.wrong(frame.request_id, f"usage says {told} output tokens, {came} came")
        else:
            entry.end = f"failed: {_reason(frame.failed)}"
        if entry.accepted_s is not None:
            self.num_accepted_ended += 1
        elif not entry.end.startswith("failed"):
            self.wrong(frame.request_id, f"{entry.end} without having been accepted")
        self.ends[entry.end] += 1
        for index, tokens in entry.tokens.items():
            self._compare(frame.request_id, entry.question, index, tuple(tokens))
        self._ended.add(frame.request_id)
        del self.alive[frame.request_id]

    def _compare(self, request_id: str, question: str, index: int, answer: tuple[int, ...]) -> None:
        known = self._answers.get((question, index), ())
        num_common = min(len(known), len(answer))
        if known[:num_common] != answer[:num_common]:
            first = next(at for at in range(num_common) if known[at] != answer[at])
            self.wrong(request_id, f"{question!r} was answered otherwise before, from token {first} on")
        if len(answer) > len(known):
            self._answers[question, index] = answer


def _reason(failed: gen.FailedEvent) -> str:
    for detail in failed.status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info.reason
    return f"code {failed.status.code}"
