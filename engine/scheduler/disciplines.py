"""How a step is filled: the disciplines by name."""

from typing import Protocol

from engine.scheduler.config import InvalidSetting, SchedulerConfig
from engine.scheduler.draft import StepDraft
from engine.scheduler.prefill_first import PrefillFirst
from engine.scheduler.state import SchedulerState
from engine.scheduler.static import Static
from engine.scheduler.unified import Unified


class Discipline(Protocol):
    """A way to fill steps. It may remember things from step to step.

    Attributes:
        name: as in the configuration.
    """

    name: str

    def __init__(self, config: SchedulerConfig) -> None: ...

    def fill(self, state: SchedulerState, draft: StepDraft) -> None:
        """Grant tokens, admit, preempt; all of it written into ``draft``."""
        ...

    def repeated(self, num_steps: int) -> None:
        """So many steps of decodes alone followed one of these, and were not filled one by one."""
        ...


DISCIPLINES: dict[str, type[Discipline]] = {d.name: d for d in (Unified, PrefillFirst, Static)}


def new_discipline(config: SchedulerConfig) -> Discipline:
    """A fresh discipline, the one the configuration names.

    Raises:
        InvalidSetting: there is none.
    """
    name = config.discipline
    if name not in DISCIPLINES:
        known = ", ".join(sorted(DISCIPLINES))
        raise InvalidSetting("scheduler.discipline", f"must be one of {known}", name)
    return DISCIPLINES[name](config)
