"""Jobs on texts that do what no tokenizer should, in a process that imports little."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from engine.runner.scripted import ScriptedTokenizer
from engine.text import Tokenizer


@dataclass(frozen=True)
class Scripted:
    """The scripted tokenizer, in a process."""

    def load(self) -> Tokenizer:
        return ScriptedTokenizer()


@dataclass(frozen=True)
class Broken:
    def load(self) -> Tokenizer:
        raise ValueError("it is broken")


@dataclass(frozen=True)
class Spin:
    """A pre-tokenizer that never ends."""

    num_bytes: int = 5

    def run(self, tokenizer: Tokenizer) -> None:
        while True:
            pass


@dataclass(frozen=True)
class Pid:
    num_bytes: int = 5

    def run(self, tokenizer: Tokenizer) -> int:
        return os.getpid()


@dataclass(frozen=True)
class Die:
    """Kills its process the first time, or each time."""

    marker: Path
    always: bool = False
    num_bytes: int = 5

    def run(self, tokenizer: Tokenizer) -> str:
        if self.always or not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"


@dataclass(frozen=True)
class Eat:
    """Takes memory without end."""

    num_bytes: int = 5

    def run(self, tokenizer: Tokenizer) -> int:
        kept: list[bytearray] = []
        while True:
            kept.append(bytearray(64 * 1024 * 1024))
