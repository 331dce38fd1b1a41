"""Policies and disciplines are known wherever their names stand."""

from pathlib import Path

import pytest

from engine.scheduler.disciplines import DISCIPLINES
from engine.scheduler.policies import POLICIES
from server.cli import DisciplineName, PolicyName
from tests.support import admissible

RULES = (Path(__file__).parents[2] / "docs" / "SCHEDULING.md").read_text()


def test_the_command_line_offers_every_policy_and_discipline() -> None:
    assert set(PolicyName) == POLICIES.keys()
    assert set(DisciplineName) == DISCIPLINES.keys()


@pytest.mark.parametrize("name", [*POLICIES, *DISCIPLINES])
def test_the_rules_have_a_row_for_it(name: str) -> None:
    assert f"\n| `{name}` " in RULES


def test_the_oracle_knows_the_order_of_every_policy() -> None:
    assert admissible.ORDERS.keys() == POLICIES.keys()
    assert {name for name, policy in POLICIES.items() if not policy.uses_level} == admissible.WITHOUT_LEVELS
