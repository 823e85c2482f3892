"""Plot of the simulator's figures by the numbers of ingresses and replicas: `python -m bench.scale.plot`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.record import RESULTS

Row = Mapping[str, Any]

_RESULT = RESULTS / "scale_simulator_sizes.json"
_PICTURE = Path("docs/images/scale.svg")
_SIZE_INCHES = (10.0, 6.5)
_HEADROOM = 1.05
_PANELS: tuple[tuple[str, str, Callable[[Row], float]], ...] = (
    ("Throughput", "tokens/s, of one ingress that knows all", lambda row: row["over_one_ingress"]),
    ("Balance", "most / mean outstanding tokens", lambda row: row["max_over_mean_outstanding"]),
    ("Interactive requests", "TTFT p99, s", lambda row: row["ttft_p99_s"]["interactive"]),
    ("Fairness", "Jain's index of tenants", lambda row: row["fairness_of_standard"]),
)


def draw(rows: list[Row], path: Path) -> None:
    """Draw a panel for each figure, with a line for each number of ingresses. The same rows give the same file."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "headway"
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    for axes, (title, unit, value) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for number in sorted({row["ingresses"] for row in rows}):
            its = [row for row in rows if row["ingresses"] == number]
            axes.plot([row["replicas"] for row in its], [value(row) for row in its], marker="o", label=str(number))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(title=title, xlabel="replicas", ylabel=unit)
        axes.set_ylim(0, _HEADROOM * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), title="ingresses", loc="outside right upper")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(_RESULT.read_text())["rows"], _PICTURE)
