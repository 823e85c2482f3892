"""Command `headway top`: the dashboard in a terminal."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.cli.clients.client import DEFAULT_URL, KeyOption, UrlOption, connected
from serve_app.cli.clients.events import JsonObject
from serve_app.cli.clients.terminal import counted

_CELLS = {
    "received": ("r", "bright_black"),
    "tokenizing": ("t", "cyan"),
    "queued": ("q", "yellow"),
    "prefill": ("p", "blue"),
    "decode": ("d", "green"),
    "preempted": ("x", "magenta"),
    "migrated": ("m", "red"),
    "delivered": (".", "bright_black"),
}
"""Letter and style of each part of a request's time, in the order of the bar; all queues are `queued`."""
_LEGEND = ", ".join(f"{letter} {part}" for part, (letter, _) in _CELLS.items())
_BAR_WIDTH = 30
_WIDTH_OF_PIPE = 160
_LINES_BESIDE_REQUESTS = 11


def top(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot, and end.")] = False,
) -> None:
    """Show replicas, queues, latencies and the last requests of a server; with API keys it needs an operator's."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_PIPE)
    with connected(url, api_key) as client:
        snapshots = client.snapshots("/dashboard/events")
        if once or not console.is_terminal:
            console.print(screen(next(snapshots), max_requests=25))
            return
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for snapshot in snapshots:
                    live.update(screen(snapshot, _room(console, snapshot)), refresh=True)
        except KeyboardInterrupt:
            return


def screen(snapshot: JsonObject, max_requests: int) -> RenderableType:
    """Return a snapshot as text, with at most `max_requests` requests."""
    return Group(
        _headline(snapshot),
        _replicas(snapshot["replicas"]),
        _bands(snapshot["queues"], snapshot["latencies"]),
        *([_batches(snapshot["batches"])] if snapshot["batches"] else []),
        _requests(snapshot["requests"][:max_requests]),
        Text(f"Parts: {_LEGEND}", style="dim"),
    )


def _room(console: Console, snapshot: JsonObject) -> int:
    """Return the number of requests that fit below the rest of the screen."""
    num_batch_lines = len(snapshot["batches"]) + 1 if snapshot["batches"] else 0
    return max(1, console.height - len(snapshot["replicas"]) - num_batch_lines - _LINES_BESIDE_REQUESTS)


def _headline(snapshot: JsonObject) -> Text:
    scaling, jobs = snapshot["autoscaling"], snapshot["jobs"]
    rate = sum(replica["generated_tokens_per_s"] for replica in snapshot["replicas"])
    facts = [f"{rate:,.0f} output tokens/s", _batches_of(jobs)]
    if (stored := snapshot["stored"]) and stored["num_bytes"]:
        facts.append(f"{counted(stored['num_responses'], 'stored response')}, {stored['num_bytes'] / 2**20:,.1f} MiB")
    if scaling is not None and "desired_replicas" in scaling:
        facts.append(f"{counted(scaling['num_replicas'], 'replica')}, {scaling['desired_replicas']} wanted")
        if scaling["drain_s"] is not None:
            facts.append(f"drain time {_seconds(scaling['drain_s'])}")
    return Text.assemble((snapshot["model"], "bold"), "   ", "   ".join(facts))


def _batches_of(jobs: list[JsonObject] | None) -> str:
    if jobs is None:
        return "the jobs process does not answer"
    in_progress = sum(value["value"] for value in jobs if value["labels"].get("state") == "in_progress")
    return f"{counted(in_progress, 'batch')} in progress"


def _table(*columns: str) -> Table:
    """Return a table; a column whose name begins with `#` has numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.startswith("#")
        table.add_column(column.lstrip("#"), justify="right" if is_number else "left", no_wrap=True)
    return table


def _replicas(replicas: list[JsonObject]) -> Table:
    table = _table("REPLICA", "STATE", "#SLOTS", "#KV", "#WAITING", "#TOKENS/S", "#AGE", "MOSTLY CHOSEN FOR")
    for replica in replicas:
        state = "draining" if replica["is_draining"] else "busy" if replica["num_running"] else "idle"
        table.add_row(
            Text(replica["replica_id"]),
            state,
            f"{replica['num_running']}/{replica['num_slots']}",
            f"{100 * replica['kv_usage']:.0f} %",
            str(replica["num_waiting"]),
            f"{replica['generated_tokens_per_s']:,.0f}",
            f"{replica['age_s']:.1f} s",
            _choice(replica["chosen_for"]),
        )
    return table


def _choice(chosen_for: JsonObject | None) -> str:
    """Return the most frequent reason for which the last requests went to a replica."""
    if chosen_for is None:
        return "-"
    return f"{chosen_for['reason'].replace('_', ' ')}, {chosen_for['num_placements']} of {chosen_for['of']}"


def _bands(queues: list[JsonObject], latencies: list[JsonObject]) -> Table:
    table = _table("BAND", "#QUEUED", "#TENANTS", "#TTFT p50", "#p95", "#TARGET", "#TPOT p50", "#p95", "#TARGET")
    for queue, latency in zip(queues, latencies, strict=True):
        ttft, tpot = latency["ttft_s"] or {}, latency["tpot_s"] or {}
        durations = [ttft.get("p50"), ttft.get("p95"), latency["ttft_target_s"]]
        durations += [tpot.get("p50"), tpot.get("p95"), latency["tpot_target_s"]]
        cells = (f"{queue['num_requests']:,}", str(queue["num_tenants"]), *map(_seconds, durations))
        table.add_row(queue["band"], *cells)
    return table


def _batches(batches: list[JsonObject]) -> Table:
    table = _table("BATCH", "TENANT", "#DONE", "#LINES", "#FAILED", "WEBHOOK")
    for batch in batches:
        counts = (batch["num_completed"] + batch["num_failed"], batch["num_lines"], batch["num_failed"])
        table.add_row(
            Text(batch["id"]),
            Text(_printable(batch["tenant"])[:20]),
            *(f"{count:,}" for count in counts),
            "at its end" if batch["has_webhook"] else "none",
        )
    return table


def _printable(text: str) -> str:
    """Return a text of a client without characters that would steer the terminal."""
    return "".join(char for char in text if char.isprintable())


def _requests(requests: list[JsonObject]) -> Table:
    table = _table("REQUEST", "STATE", "TENANT", "BAND", "#TOTAL", "PARTS", "LONGEST")
    for request in requests:
        metrics = request["metrics"]
        longest = max(metrics["parts_ms"], key=metrics["parts_ms"].__getitem__)
        table.add_row(
            Text(_printable(request["id"])[:16]),
            request["part"] or request["status"],
            Text(_printable(request["tenant"])[:20]),
            request["band"],
            _seconds(metrics["total_ms"] / 1000),
            bar(metrics),
            f"{longest.replace('_', ' ')} {_seconds(metrics['parts_ms'][longest] / 1000)}",
        )
    return table


def bar(metrics: dict[str, Any]) -> Text:
    """Return the parts of a request's time as a bar: the letter of its part in each cell."""
    spent = dict.fromkeys(_CELLS, 0.0)
    for part, part_ms in metrics["parts_ms"].items():
        spent["queued" if part.startswith("queued") else part] += part_ms
    text, end, done_ms = Text(), 0, 0.0
    for part, part_ms in spent.items():
        done_ms += part_ms
        start, end = end, round(_BAR_WIDTH * done_ms / metrics["total_ms"]) if metrics["total_ms"] else 0
        letter, style = _CELLS[part]
        text.append(letter * (end - start), style=style)
    return text


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
