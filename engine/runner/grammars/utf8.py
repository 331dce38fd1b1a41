"""Which bytes may follow each other in UTF-8 (The Unicode Standard, table 3-7), as a small automaton.

A state is the ranges that the bytes still missing from a character must lie in; the empty one is between
two characters. The matchers of libraries may think in numbers of bytes alone and let surrogates,
overlong forms and numbers past U+10FFFF pass.
"""

from collections.abc import Sequence

State = tuple[tuple[int, int], ...]

BETWEEN: State = ()
_ANY = (0x80, 0xBF)
#: First byte, last byte, and what must follow it.
_LEADS: tuple[tuple[int, int, State], ...] = (
    (0x00, 0x7F, ()),
    (0xC2, 0xDF, (_ANY,)),
    (0xE0, 0xE0, ((0xA0, 0xBF), _ANY)),
    (0xE1, 0xEC, (_ANY, _ANY)),
    (0xED, 0xED, ((0x80, 0x9F), _ANY)),
    (0xEE, 0xEF, (_ANY, _ANY)),
    (0xF0, 0xF0, ((0x90, 0xBF), _ANY, _ANY)),
    (0xF1, 0xF3, (_ANY, _ANY, _ANY)),
    (0xF4, 0xF4, ((0x80, 0x8F), _ANY, _ANY)),
)
#: All states there are.
STATES: tuple[State, ...] = tuple(
    dict.fromkeys(after[place:] for _, _, after in _LEADS for place in range(len(after) + 1))
)


def after(state: State, text: bytes) -> State | None:
    """The state after ``text``; None where that is no UTF-8."""
    for byte in text:
        if state:
            low, high = state[0]
            if not low <= byte <= high:
                return None
            state = state[1:]
            continue
        found = next((rest for low, high, rest in _LEADS if low <= byte <= high), None)
        if found is None:
            return None
        state = found
    return state


def allowed_from(state: State, texts: Sequence[bytes]) -> list[bool]:
    """Which of ``texts`` may follow in ``state``."""
    is_between = state == BETWEEN
    return [is_between if text.isascii() else after(state, text) is not None for text in texts]
