"""What the commands of ``vorrang sim`` share: options' texts, defaults, exit codes."""

from collections.abc import Mapping, Sequence

from engine.scheduler.config import InvalidSetting
from engine.sim.configurations import Value, parse_assignment
from workloads.errors import InvalidWorkload
from workloads.mixes import MIXES
from workloads.sources import ready_workloads

EXIT_DIFFERENT = 1
EXIT_USAGE = 2

#: A month of arrivals, and a pool of 64 million tokens: more takes all memory before it takes the first step.
MAX_DURATION_S = 31 * 86400.0
MAX_NUM_BLOCKS = 4_000_000

WORKLOAD_HELP = (
    f"A workload file (.toml), a trace, a ready workload ({', '.join(ready_workloads())}) "
    f"or a mix ({', '.join(MIXES)})."
)


def parse_settings(texts: Sequence[str]) -> dict[str, Value]:
    """Read ``field=value`` texts; a later one wins.

    Raises:
        InvalidSetting: no such field, not a value of its type, or the policy, which is no setting of all.
    """
    settings: dict[str, Value] = {}
    for text in texts:
        assignment = parse_assignment(text)
        if "policy" in assignment:
            raise InvalidSetting("set", "must leave the policy to an option of its own", text)
        settings |= assignment
    return settings


def parse_shares(text: str) -> Mapping[str, float]:
    """Read ``CLASS=SHARE,...``.

    Raises:
        InvalidWorkload: it is not of that form.
    """
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name: float(share) for name, share in pairs}
    except ValueError:
        raise InvalidWorkload("classes", "must be CLASS=SHARE,...", text) from None
