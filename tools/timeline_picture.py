"""Run the demo and draw the timeline of its `priority` half into docs/pictures/timeline.png.

Usage: PYTHONPATH=.:protos python tools/timeline_picture.py [--log FILE] [DEMO OPTIONS]
With --log no demo is run.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from server.trace import trace

PICTURE = Path(__file__).resolve().parents[1] / "docs/pictures/timeline.png"
#: Small enough that every name can be read.
DEMO = ("--seats", "3", "--batch", "5", "--interactive", "2", "--max-tokens", "40", "--gap", "45")


def main() -> None:
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path)
    options, demo = parser.parse_known_args()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    if options.log is not None:
        print(trace(options.log, None, PICTURE))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "clients.python.cli", "demo", "--decisions", folder]
        subprocess.run([*command, *(demo or DEMO)], check=False)  # a slow machine may break its promises
        print(trace(Path(folder) / "priority.log", None, PICTURE))


if __name__ == "__main__":
    main()
