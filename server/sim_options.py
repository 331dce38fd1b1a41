"""What the commands of ``vorrang sim`` share: options' texts, defaults, exit codes."""

from collections.abc import Mapping

from workloads.errors import InvalidWorkload
from workloads.mixes import MIXES
from workloads.sources import ready_workloads

EXIT_DIFFERENT = 1
EXIT_USAGE = 2

WORKLOAD_HELP = (
    f"A workload file (.toml), a trace, a ready workload ({', '.join(ready_workloads())}) "
    f"or a mix ({', '.join(MIXES)})."
)


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
