"""Command `headway`, which collects the subcommands."""

from __future__ import annotations

import typer

from serve_app.cli import batch
from serve_app.cli.serve import serve

app = typer.Typer(
    name="headway",
    help="Serve language models, and run batches of requests on a server.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.add_typer(batch.app, name="batch")

if __name__ == "__main__":
    app()
