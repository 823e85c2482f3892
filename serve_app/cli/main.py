"""Command `headway`, which collects the subcommands."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_PACKAGE = "headway-serve"
_COMMANDS = {
    "serve": "serve_app.cli.serve:app",
    "run": "serve_app.cli.run:run",
    "check": "serve_app.cli.check:check",
    "chat": "serve_app.cli.clients.chat:chat",
    "complete": "serve_app.cli.clients.complete:complete",
    "batch": "serve_app.cli.clients.batch:app",
    "stored": "serve_app.cli.clients.stored:app",
    "top": "serve_app.cli.clients.top:top",
    "grafana": "serve_app.cli.grafana:grafana",
    "bench": "serve_app.cli.clients.bench:bench",
    "models": "serve_app.cli.models:app",
    "keys": "serve_app.cli.keys:app",
    "doctor": "serve_app.cli.doctor:doctor",
}
"""Map from a command's name to its function or its group of commands."""


class LazyCommands(TyperGroup):
    """Commands that are imported on first use, so that `headway chat` does not load the server's libraries.

    The types are `Any`: they are Click's in some versions of typer, and typer's own copy of Click's in others.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command; None: there is no such command."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        try:
            target = getattr(import_module(module), attribute)
        except ImportError as error:
            remedy = f"install the libraries again: `make venv`, or `pip install --force-reinstall {_PACKAGE}`"
            print(f"error: {error}; {remedy}", file=sys.stderr)
            raise typer.Exit(1) from None
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(cmd_name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the words name; a name that does not exist is refused with the most similar one."""
        if args[0] not in _COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            similar = get_close_matches(args[0], _COMMANDS, n=1)
            ctx.fail(f"There is no command {args[0]!r}." + (f" Did you mean {similar[0]!r}?" if similar else ""))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="headway",
    cls=LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"headway {version(_PACKAGE)}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models, use a server, and look after both."""


if __name__ == "__main__":
    app(prog_name="headway")
