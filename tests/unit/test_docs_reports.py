"""What docs/REPORTS.md shows is what the commands take."""

import gzip
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer.main

from clients.python.cli import main as vorrangctl
from server.sim import app as sim
from workloads.files import parse_workload
from workloads.sources import ready_workloads

PAGE = (Path(__file__).parents[2] / "docs/REPORTS.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


COMMANDS = [
    line
    for block in blocks("sh")
    for line in block.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]


def test_the_example_of_the_format_can_be_read(tmp_path):
    (example,) = blocks("toml")
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    (tmp_path / "azure_llm_2023_code.csv.gz").write_bytes(gzip.compress(rows.encode()))
    workload = parse_workload(tomllib.loads(example), folder=tmp_path)
    assert {r.label for r in workload.requests} == {"chat", ""}


def test_every_ready_workload_is_described():
    assert set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)) == set(ready_workloads())


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one(line):
    program, *arguments = shlex.split(line)
    if program == "vorrang":
        assert arguments.pop(0) == "sim"
    group = typer.main.get_command(sim if program == "vorrang" else vorrangctl)
    command = group.commands[arguments.pop(0)]
    command.make_context(program, arguments)  # refuses what it does not know


def test_there_are_commands():
    assert len(COMMANDS) == 5
