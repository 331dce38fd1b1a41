"""Where a request stands, told from its events; what the terminal views draw. Knows no terminal."""

from enum import StrEnum

from clients.python.errors import VorrangError
from clients.python.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    Preempted,
    PriorityChanged,
    QueueUpdate,
    Resumed,
    Started,
    Usage,
)

_WORTH_SAYING_S = 0.05


class State(StrEnum):
    """Where a request stands; PREEMPTED is loud because it is what one watches for."""

    SENT = "sent"
    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "PREEMPTED"
    RESUMED = "resumed"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class Progress:
    """State, counts and text of one request.

    Attributes:
        state: where it stands.
        level: priority in force; None until the server has said.
        priority_ignored: the policy in force does not look at priority.
        queue_position: requests that were to be served before it when last heard.
        num_tokens: output tokens so far.
        preemptions: how often it has been preempted.
        text: output so far.
        preempted_at: where in the text it was preempted.
        is_cut_off: the connection is lost and looked for; set by whoever sees that.
        note: why it ended.
    """

    def __init__(self) -> None:
        self.state = State.SENT
        self.level: int | None = None
        self.priority_ignored = False
        self.queue_position = 0
        self.num_tokens = 0
        self.preemptions = 0
        self.text = ""
        self.preempted_at: list[int] = []
        self.is_cut_off = False
        self.note = ""
        self._usage: Usage | None = None

    def apply(self, event: Event) -> bool:
        """Take in one event; True when the state has changed."""
        before = self.state
        match event:
            case Accepted():
                self.state = State.QUEUED
                self.level = event.level
                self.priority_ignored = event.priority_ignored
                self.queue_position = event.queue_position
            case QueueUpdate():
                self.queue_position = event.queue_position
            case Started():
                self.state = State.RUNNING
            case Delta():
                self.num_tokens += len(event.token_ids)
                self.text += event.text
            case Preempted():
                self.state = State.PREEMPTED
                self.preemptions = event.count
                self.preempted_at.append(len(self.text))
            case Resumed():
                self.state = State.RESUMED
            case PriorityChanged():
                self.level = event.level
            case Finished():
                self.state = State.DONE
                self.note = event.reason
                self._usage = event.usage
        return self.state is not before

    def fail(self, error: VorrangError) -> None:
        """It ended with ``error``."""
        self.state = State.FAILED
        self.note = str(error)

    def stop(self) -> None:
        """Its user stopped it."""
        self.state = State.STOPPED

    def describe(self) -> str:
        """One line for people."""
        parts: list[str] = [self.state]
        if self.state is State.QUEUED:
            parts[0] = f"queued, {self.queue_position} ahead"
        if self.is_cut_off and self.state not in (State.DONE, State.FAILED, State.STOPPED):
            parts.insert(0, "connection lost, looking for the server")
        if self.note:
            parts.append(self.note)
        if self.level is not None and self.state is not State.DONE:
            parts.append(f"level {self.level}" + (" (not looked at)" if self.priority_ignored else ""))
        if self.num_tokens:
            parts.append(f"{self.num_tokens} tokens")
        if self._usage is not None and self._usage.queued_s >= _WORTH_SAYING_S:
            parts.append(f"queued {self._usage.queued_s:.1f} s")
        if self.preemptions:
            waited_s = self._usage.preempted_s if self._usage is not None else 0.0
            waited = f", {waited_s:.1f} s" if waited_s >= _WORTH_SAYING_S else ""
            parts.append(f"preempted {self.preemptions}x{waited}")
        return " | ".join(parts)
