"""Picture of interactive requests beside a backlog of batch requests: `python -m bench.pictures.mixed_load_picture`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import RESULTS

Row = Mapping[str, Any]

_RESULT = RESULTS / "gpu_h200.json"
_PICTURE = Path("docs/images/mixed-load.svg")
_SIZE_INCHES = (10.0, 2.9)
_SERVERS = {"headway-tp": "Headway", "vllm-equal": "vLLM with priorities"}
_COLORS = ("#7aa6d8", "#1f5fa8")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the waits of the interactive requests, and the tokens of the backlog. The same rows give the same file."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "headway"
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    waits, backlog = figure.subplots(1, 2, sharey=True)
    interactive, batch = (_by_server(rows, f"mixed: {part}") for part in ("interactive", "backlog"))
    _bars(waits, interactive, {"p50": "ttft_p50_ms", "p99": "ttft_p99_ms"}, _duration, "upper right")
    waits.set(title="Interactive requests: time to first token", xscale="log", xlabel="ms", xlim=(10, 200_000))
    _bars(backlog, batch, {"before": "tok_s_before", "meanwhile": "tok_s_during"}, "{:,.0f}".format, "lower right")
    backlog.set(title="Backlog of 400 batch requests: output", xlabel="tokens/s", xlim=(0, 40_000))
    figure.savefig(path, metadata={"Date": None})


def _by_server(rows: Sequence[Row], part: str) -> list[Row]:
    return [next(row for row in rows if row["server"] == server and row["part"] == part) for server in _SERVERS]


def _bars(axes: Any, rows: Sequence[Row], fields: Mapping[str, str], text: Callable[[float], str], legend: str) -> None:
    """Draw a group of bars for each server, the first on top, with a bar for each field."""
    height = 0.8 / len(fields)
    for number, ((label, field), color) in enumerate(zip(fields.items(), _COLORS, strict=True)):
        places = [server + (number - (len(fields) - 1) / 2) * height for server in range(len(rows))]
        bars = axes.barh(places, [row[field] for row in rows], 0.9 * height, label=label, color=color)
        axes.bar_label(bars, [text(row[field]) for row in rows], padding=4)
    axes.set_yticks(range(len(rows)), _SERVERS.values())
    axes.yaxis.set_inverted(True)
    axes.legend(loc=legend)
    axes.spines[["top", "right"]].set_visible(False)


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.0f} s"


if __name__ == "__main__":
    draw(json.loads(_RESULT.read_text())["http"], _PICTURE)
