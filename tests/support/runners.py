"""Runners in processes of their own, for tests: models that die when they read a certain token."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from engine.errors import InternalError
from engine.models.errors import InvalidCheckpoint
from engine.runner.child import RunnerLimits
from engine.runner.grammars.byte_compiler import ByteCompiler
from engine.runner.grammars.forking import ForkingHost
from engine.runner.grammars.limits import GrammarLimits
from engine.runner.grammars.masks import Masks
from engine.runner.scripted import VOCAB_SIZE
from engine.runner.sources import ScriptedModel, ScriptedSource
from engine.scheduler.plan import StepResult

#: Token ids that are fatal to the process that computes them.
EXITS, ABORTS, KILLS_ITSELF, STOPS_ITSELF, SLEEPS = range(250, 255)
#: Token ids that fail the whole step, or the request alone.
RAISES, FAILS = 248, 249

#: Patient, so that a busy machine makes no process look hung; and where one does hang.
LIMITS = RunnerLimits(hang_s=10.0, backoff_s=0.01)
HANG_LIMITS = RunnerLimits(hang_s=0.5, backoff_s=0.01)


@dataclass(frozen=True, slots=True)
class FatalSource(ScriptedSource):
    """The scripted model, but some token ids kill its process."""

    def load(self, pool):
        return FatalModel(self)


class FatalModel(ScriptedModel):
    def run(self, plan):
        ids = {token_id for grant in plan.grants for token_id in grant.token_ids}
        if EXITS in ids:
            os._exit(3)
        if ABORTS in ids:
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGABRT)
            time.sleep(60)
        if KILLS_ITSELF in ids:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        if STOPS_ITSELF in ids:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
        if RAISES in ids:
            raise ValueError("a bug in the model")
        if SLEEPS in ids:
            time.sleep(60)
        if FAILS in ids:
            structlog.get_logger("test").error("row.failed", why=ValueError("not plain"), step=plan.step)
            guilty = {g.request_id for g in plan.grants if FAILS in g.token_ids}
            sampled = super().run(plan).sampled
            return StepResult(
                {i: token_id for i, token_id in sampled.items() if i not in guilty},
                {i: InternalError("f00d") for i in guilty},
            )
        return super().run(plan)


@dataclass(frozen=True, slots=True)
class FatalGrammars(ScriptedSource):
    """The scripted model, whose grammars have processes; the answer "exit" kills the one that compiles it.

    The answer "until" is compiled once there is a file of the name that the next answer is.
    """

    def load(self, pool):
        model = ScriptedModel(self)
        model.masks = model.runner.masks = Masks(ForkingHost(FatalCompiler, VOCAB_SIZE, GrammarLimits()))
        return model


class FatalCompiler(ByteCompiler):
    def compile(self, spec):
        if "exit" in spec.choices:
            os._exit(3)
        if spec.choices[0] == "until":
            while not Path(spec.choices[1]).exists():
                time.sleep(0.01)
        return super().compile(spec)


@dataclass(frozen=True, slots=True)
class FailingSource:
    """A model that can't be loaded: it raises, or its process dies, from the given load on.

    ``counter``: a file that counts loads.
    """

    how: str
    counter: str = ""
    from_load: int = 0

    def load(self, pool):
        if self.counter:
            with open(self.counter, "a+") as file:
                file.write(".")
                file.seek(0)
                if len(file.read()) <= self.from_load:
                    return ScriptedModel(ScriptedSource(64, 4))
        match self.how:
            case "raise":
                raise InvalidCheckpoint("model.safetensors is damaged")
            case "exit":
                os._exit(7)
            case "sleep":
                time.sleep(60)
            case "lambda":
                raise type("Local", (Exception,), {})("made here")
        return None


def is_running(pid):
    """Whether a process is there; a zombie is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
