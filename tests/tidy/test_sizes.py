"""Functions and files stay short; the written exceptions may only shrink, and leave the list once they have.

How a function branches is held by ruff (C901 in pyproject.toml).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import ROOT

FOLDERS = [
    "bench",
    "clients/python",
    "engine",
    "kernels",
    "kv",
    "report",
    "server",
    "tests",
    "timeline",
    "tools",
    "workloads",
]
FUNCTION_LINES, FILE_LINES = 70, 500
#: Those that are longer, with the lines they have: options of commands, kernels, tables of cases.
LONG_FUNCTIONS = {
    "clients/python/bench_cli.py bench": 120,
    "clients/python/cli.py generate": 102,
    "clients/python/load_cli.py load": 91,
    "engine/models/registry.py load_model": 127,
    "engine/runner/choices.py choices_of": 76,
    "engine/sim/simulator.py simulate": 81,
    "kernels/gpu/paged_decode.py paged_decode": 76,
    "kernels/gpu/paged_decode.py split_kernel": 93,
    "kernels/gpu/paged_prefill.py _visit": 81,
    "kernels/gpu/paged_prefill.py prefill_kernel": 90,
    "kernels/gpu/sample.py sample_kernel": 93,
    "server/cli.py serve": 75,
    "server/sim_report.py report": 82,
    "tests/e2e/test_client_chat.py "
    "test_in_a_terminal_one_sees_the_queue_changes_the_priority_and_stops_an_answer": 72,
    "tests/support/dear.py cases": 155,
}
LONG_FILES = {
    "engine/scheduler/scheduler.py": 517,
    "tests/support/drive.py": 559,
    "tests/unit/test_client_session.py": 607,
    "tests/unit/test_process_runner.py": 524,
    "tests/unit/test_scheduler_prefill_first.py": 536,
}


def sources() -> Iterator[tuple[str, str]]:
    """Every file of ours, by its path in the repository, with its text."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def long_functions(path: str, text: str) -> dict[str, int]:
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > FUNCTION_LINES:
                found[f"{path} {node.name}"] = num_lines
    return found


def compare(found: dict[str, int], allowed: dict[str, int], most: int) -> None:
    grown = {name: lines for name, lines in found.items() if lines > allowed.get(name, most)}
    assert not grown, f"longer than {most} lines, or than the list allows"
    shrunk = {name: found.get(name) for name, lines in allowed.items() if found.get(name) != lines}
    assert not shrunk, "shorter than the list says (None: short enough): write it down there"


def test_functions_stay_short() -> None:
    found: dict[str, int] = {}
    for path, text in sources():
        found |= long_functions(path, text)
    compare(found, LONG_FUNCTIONS, FUNCTION_LINES)


def test_files_stay_short() -> None:
    lines = {path: text.count("\n") for path, text in sources()}
    assert len(lines) > 300
    compare({path: num for path, num in lines.items() if num > FILE_LINES}, LONG_FILES, FILE_LINES)


def test_a_long_function_is_found_and_the_list_may_only_shrink() -> None:
    body = "    pass\n" * FUNCTION_LINES
    found = long_functions("a.py", f"def f():\n{body}")
    assert found == {"a.py f": FUNCTION_LINES + 1}
    compare(found, {"a.py f": FUNCTION_LINES + 1}, FUNCTION_LINES)
    wrong: list[dict[str, int]] = [{}, {"a.py f": FUNCTION_LINES}, {"a.py f": 99}, found | {"gone": 80}]
    for allowed in wrong:
        with pytest.raises(AssertionError, match=r"lines, or than|shorter than"):
            compare(found, allowed, FUNCTION_LINES)
    assert Path(__file__).relative_to(ROOT).as_posix() in dict(sources())
