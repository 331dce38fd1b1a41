"""Settings of the scheduler that break a rule."""

import pytest

from engine.scheduler.config import InvalidSetting, SchedulerConfig
from engine.scheduler.policies import POLICIES
from tests.support.drive import Driver


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_running_requests", 0),
        ("max_step_tokens", 3),
        ("max_chunk_tokens", 0),
        ("preempt_level_gap", 0),
        ("starved_share", 0.0),
        ("starved_share", 1.0),
        ("resume_quantum_tokens", -1),
        ("max_preemptions", 0),
        ("max_bypass", -1),
        ("max_context_tokens", 1),
        ("max_waiting_requests", 0),
    ],
)
def test_bad_settings_name_field_and_value(field, value):
    with pytest.raises(InvalidSetting, match=rf"scheduler\.{field} .*got {value}"):
        SchedulerConfig(**({"max_running_requests": 4} | {field: value}))


def test_an_unknown_policy_is_named():
    known = ", ".join(sorted(POLICIES))
    with pytest.raises(InvalidSetting, match=f"policy must be one of {known}, got 'lottery'"):
        Driver(policy="lottery")
