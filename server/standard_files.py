"""Standard input, output and error: there is always something at 0, 1 and 2.

A server started with one of them closed would give its number to the next socket or
file, and whatever is printed would go there.
"""

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_closed() -> None:
    """Put the null device where one is closed; to be called before anything is opened."""
    for number in range(len(_NAMES)):
        try:
            os.fstat(number)
        except OSError:
            _to_null(number)
    for number, name in enumerate(_NAMES):  # once all numbers are taken, so that these files take none
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115


def say(line: object) -> None:
    """Print a line; where nobody can read it, nothing is printed from here on."""
    try:
        print(line, flush=True)  # noqa: T201
    except OSError:  # a pipe without a reader, a full disk
        _to_null(1)


def _to_null(number: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    os.set_inheritable(number, True)
