"""The unified discipline: one ordered pass over running and waiting requests.

There is no prefill or decode phase; a request computes the next tokens it
misses. The idea is vLLM V1's (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", SOSP 2023, and its successor
scheduler), made aware of urgency: see docs/SCHEDULING.md for the numbered rules.
"""

from engine.scheduler.admission import Admission
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import StepDraft
from engine.scheduler.prefill import PrefillPass, grant_decodes
from engine.scheduler.state import SchedulerState


class Unified:
    """Fills a step: decodes, then the share of the starved, then prefill chunks and admissions."""

    name = "unified"

    def __init__(self, config: SchedulerConfig) -> None:
        """It has no settings of its own."""

    def fill(self, state: SchedulerState, draft: StepDraft) -> None:
        """Grant tokens, admit, preempt; all of it written into ``draft``."""
        starved = state.starvation.update(draft.now)
        admission = Admission(state, draft)
        admission.let_decodes_grow()
        grant_decodes(state, draft)
        PrefillPass(state, draft, admission).run(starved)

    def repeated(self, num_steps: int) -> None:
        """It remembers nothing."""
