"""Command `headway models`: the models that this machine has fetched or converted."""

from __future__ import annotations

from typing import Annotated

import typer
from filelock import Timeout
from rich.filesize import decimal

from replicas.errors import ModelLoadError
from serve_app.cli.clients.terminal import date_text, fail, print_table
from serve_app.models.default_model import DEFAULT_MODEL_NAME

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Models in the caches of this machine.")


@app.command("list")
def list_models() -> None:
    """List the models, with their sizes and the last use."""
    from serve_app.models.cache import cached_models

    models = cached_models()
    rows = [(model.name, model.kind, decimal(model.num_bytes), date_text(model.used_unix_s)) for model in models]
    print_table(("NAME", "KIND", "SIZE", "LAST USED"), rows)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="Hub id, GGUF file, or the name of the default model.")] = (
        DEFAULT_MODEL_NAME
    ),
) -> None:
    """Fetch MODEL, or convert it if it is a GGUF file, so that `headway serve` starts at once; print its directory.

    Repeat the command after a cut: it goes on, and checks the hash of each file from the hub.
    """
    from serve_app.cli.server.served_model import directory_of

    try:
        print(directory_of(model, checks_all=True))
    except ModelLoadError as error:
        fail(str(error))


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names as `headway models list` shows them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove models from the disk."""
    from serve_app.models.cache import cached_models, nearest

    known = {model.name: model for model in cached_models()}
    unknown = [name for name in names if name not in known]
    if unknown:
        fail(f"there is no model {', '.join(unknown)} in the caches{nearest(unknown[0])}")
    for name in dict.fromkeys(names):
        size = decimal(known[name].num_bytes)
        if not yes:
            typer.confirm(f"Remove {name} ({size})?", abort=True)
        try:
            known[name].remove()
        except Timeout:
            fail(f"{name} is being converted by another process")
        except OSError as error:
            fail(f"{name}: {error}")
        print(f"Removed {name} ({size}).")
