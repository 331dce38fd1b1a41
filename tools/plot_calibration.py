"""Draws measured against simulated latencies; the figure of docs/SIMULATOR.md.

    PYTHONPATH=. python tools/plot_calibration.py [TRACES [PNG]]

TRACES defaults to ../shared/traces, PNG to docs/figures/simulator-calibration.png.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from engine.sim.calibration import MEASURED_RUNS, replay

ROOT = Path(__file__).resolve().parent.parent
UNITS = {"TTFT": (1.0, "s"), "TPOT": (1e3, "ms"), "E2E": (1.0, "s")}


def main(traces: Path, png: Path) -> None:
    """Replay every measured run, print the means and draw the distributions."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    grid = figure.subplots(len(MEASURED_RUNS), len(UNITS))
    for row, run in zip(grid, MEASURED_RUNS.values(), strict=True):
        comparison = replay(run, traces / "calibration" / run.file)
        for name, quantity in comparison.quantities.items():
            print(f"{run.name} {name}: {quantity}")
        print(f"{run.name} preemptions simulated: {comparison.num_preemptions}")
        for axes, (name, (scale, unit)) in zip(row, UNITS.items(), strict=True):
            quantity = comparison.quantities[name]
            axes.ecdf(scaled(quantity.measured, scale), label="measured, vLLM 0.19.0", color="0.45", lw=3)
            axes.ecdf(scaled(quantity.simulated, scale), label="simulated", color="tab:orange", lw=1.5)
            axes.set_title(f"{run.name}: {name}, mean {quantity.error:+.1%}", fontsize=10)
            axes.set_xlabel(f"{name} ({unit})")
            axes.set_ylabel("share of requests")
            axes.grid(alpha=0.3)
    grid[0][0].legend(loc="upper left", fontsize=8)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=110, metadata={"Software": None})


def scaled(values: Sequence[float], scale: float) -> list[float]:
    """Values in another unit."""
    return [value * scale for value in values]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(
        Path(arguments[0]) if arguments else ROOT.parent / "shared" / "traces",
        Path(arguments[1]) if len(arguments) > 1 else ROOT / "docs/figures/simulator-calibration.png",
    )
