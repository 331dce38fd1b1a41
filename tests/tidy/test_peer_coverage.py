"""Which behaviours of the peers' test suites are held here: docs/PEERS.md and the tests agree.

A test names a behaviour by "vLLM n" or "SGLang n" in its decorators, docstring or comments.
"""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_BEHAVIOURS = {"vLLM": 70, "SGLang": 44}
#: Behaviours that have tests at least.
LEAST = 80
NAME = re.compile(r"\b(vLLM|SGLang) (\d+)\b(?!\.\d)")
ROW = re.compile(r"\| (\d+) \| ([^|]+) \| (same|differs|not yet)(?:: ([^|]+))? \| ([^|]*)\|")

Behaviour = tuple[str, int]


def behaviours_in(text: str) -> set[Behaviour]:
    return {(peer, int(number)) for peer, number in NAME.findall(text)}


@functools.cache
def behaviours_by_test() -> dict[str, set[Behaviour]]:
    """Behaviours named by each test function, decorators included; prose outside of tests does not count."""
    named: dict[str, set[Behaviour]] = defaultdict(set)
    for path in sorted({*(ROOT / "tests").rglob("test_*.py")} - {Path(__file__).resolve()}):
        lines = path.read_text().splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                named[node.name] |= behaviours_in("\n".join(lines[first - 1 : node.end_lineno]))
    return named


def rows() -> list[tuple[Behaviour, str, str, list[str]]]:
    """Behaviour, verdict, reason and tests of every row of docs/PEERS.md."""
    found, peer = [], ""
    for line in (ROOT / "docs/PEERS.md").read_text().splitlines():
        if line.startswith("## "):
            peer = line.removeprefix("## ")
        elif re.match(r"\| \d", line):
            row = ROW.fullmatch(line)
            assert row, f"docs/PEERS.md has a row in another form: {line}"
            number, _, verdict, why, tests = row.groups()
            found.append(((peer, int(number)), verdict, why or "", re.findall(r"`(test_\w+)`", tests)))
    return found


def test_enough_behaviours_are_held_by_tests():
    assert len(set().union(*behaviours_by_test().values())) >= LEAST


def test_every_behaviour_that_a_test_names_exists():
    for test, behaviours in behaviours_by_test().items():
        for peer, number in behaviours:
            assert 1 <= number <= NUM_BEHAVIOURS[peer], f"{test} names {peer} {number}"


@pytest.mark.parametrize("peer", NUM_BEHAVIOURS)
def test_the_document_has_a_row_for_every_behaviour(peer):
    numbers = [number for (found, number), *_ in rows() if found == peer]
    assert numbers == list(range(1, NUM_BEHAVIOURS[peer] + 1))


def test_every_test_in_the_document_exists_and_names_its_behaviour():
    named = behaviours_by_test()
    for behaviour, verdict, why, tests in rows():
        assert bool(tests) == (verdict != "not yet"), behaviour
        assert bool(why) == (verdict != "same"), f"{behaviour}: {verdict}, and nothing says how or why"
        for test in tests:
            assert behaviour in named.get(test, ()), f"{test} does not name {behaviour}"


def test_what_the_document_says_is_not_there_yet_is_named_by_no_test():
    named = set().union(*behaviours_by_test().values())
    assert not named & {behaviour for behaviour, verdict, *_ in rows() if verdict == "not yet"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("vLLM 3, SGLang 12: x", {("vLLM", 3), ("SGLang", 12)}),
        ("vLLM 0.32 and vLLM 33.", {("vLLM", 33)}),
        ("vLLM V1, vLLM 1a", set()),
    ],
)
def test_a_version_is_no_behaviour(text, found):
    assert behaviours_in(text) == found
