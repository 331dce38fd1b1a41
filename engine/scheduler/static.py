"""The static discipline: a batch is closed until all its members have ended.

Only to measure what continuous batching buys. A batch is made when nothing runs,
of whoever fits seats and blocks at its longest length; then all members prefill,
then all decode, and the seats of those that end first stay empty. Conceptually
every member is padded to the longest, but padding is not charged: a plan holds the
tokens that are really computed, so static batching looks better here than it is.
"""

from engine.scheduler.admission import Admission
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import StepDraft
from engine.scheduler.prefill import PrefillPass
from engine.scheduler.state import SchedulerState


class Static:
    """Fills a step: a new batch if nothing runs, else its prefills, else its decodes."""

    name = "static"

    def __init__(self, config: SchedulerConfig) -> None:
        """It has no settings of its own."""

    def fill(self, state: SchedulerState, draft: StepDraft) -> None:
        """Grant tokens and, between two batches, admit; all of it written into ``draft``."""
        starved = state.starvation.update(draft.now)
        if not state.running:
            PrefillPass(state, draft, Admission(state, draft, for_good=True)).run(starved)
            return
        for request in sorted(state.prefilling, key=state.policy.rank):
            draft.grant_chunk(request, state.config.max_chunk_tokens)
        if draft.is_empty:
            draft.decode(state.ready_decodes())  # their blocks were taken when they were admitted

    def repeated(self, num_steps: int) -> None:
        """It remembers nothing."""
