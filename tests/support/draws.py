"""What random tests draw of policies and disciplines: all there are, the usual ones more often."""

from engine.scheduler.disciplines import DISCIPLINES
from engine.scheduler.policies import POLICIES

POLICY_DRAWS = ["priority", "priority", *POLICIES]
DISCIPLINE_DRAWS = [*["unified"] * 4, *["prefill_first"] * 2, *DISCIPLINES]
