"""How a step is filled: the disciplines by name."""

from typing import Protocol

from engine.scheduler.config import InvalidSetting
from engine.scheduler.draft import StepDraft
from engine.scheduler.state import SchedulerState
from engine.scheduler.unified import Unified


class Discipline(Protocol):
    """A way to fill steps. It may remember things from step to step.

    Attributes:
        name: as in the configuration.
    """

    name: str

    def fill(self, state: SchedulerState, draft: StepDraft) -> None:
        """Grant tokens, admit, preempt; all of it written into ``draft``."""
        ...


DISCIPLINES: dict[str, type[Discipline]] = {"unified": Unified}


def discipline_named(name: str) -> Discipline:
    """A fresh discipline of that name.

    Raises:
        InvalidSetting: there is none.
    """
    if name not in DISCIPLINES:
        known = ", ".join(sorted(DISCIPLINES))
        raise InvalidSetting("scheduler.discipline", f"must be one of {known}", name)
    return DISCIPLINES[name]()
