"""Command `headway grafana`: the dashboards for Grafana as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from serve_app.monitoring.grafana import Source, dashboard


def grafana(
    directory: Annotated[Path, typer.Argument(help="Directory from which Grafana provisions dashboards.")] = Path(),
) -> None:
    """Write the dashboards for Grafana: headway.json asks for /metrics, headway_ray.json for Ray's exporter."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for source in Source:
            path = directory / f"{source.value}.json"
            path.write_text(json.dumps(dashboard(source), indent=2) + "\n")
            print(path)
    except OSError as error:
        typer.echo(f"The dashboards cannot be written: {error}", err=True)
        raise typer.Exit(1) from None
