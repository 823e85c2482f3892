"""Command `headway keys`: create, list and revoke the API keys in a key file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from filelock import Timeout

from replicas.protocol import Band
from serve_app.cli.clients.generation import BandName
from serve_app.cli.clients.terminal import fail, message_of, print_table, stderr
from serve_app.keys.key_file import KeyOwner, changed_owners, digest_of, new_key, read_owners

_SHOWN_DIGITS = 12
_MIN_DIGITS = 4

FileOption = Annotated[Path, typer.Option("--file", "-f", envvar="HEADWAY_KEY_FILE", help="Key file.", dir_okay=False)]
DEFAULT_FILE = Path("keys.yaml")

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="API keys in a key file, which a server reads (`api_key_file`)."
)


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Owner of the key; scheduling is fair between tenants.")],
    ceiling: Annotated[BandName, typer.Option(help="Most urgent band that the key may use.")] = "standard",
    operator: Annotated[bool, typer.Option("--operator", help="The key opens /metrics and /load, too.")] = False,
    note: Annotated[str | None, typer.Option(help="Remark for people, such as the key's purpose.")] = None,
    file: FileOption = DEFAULT_FILE,
) -> None:
    """Create a key and print it, once; the file gets only its SHA-256."""
    if not tenant.strip():
        raise typer.BadParameter("--tenant is empty")
    key = new_key()
    created = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    with _reported_errors(), changed_owners(file) as owners:
        owners[digest_of(key)] = KeyOwner(tenant, Band[ceiling.upper()], operator, created, note)
    stderr().print(f"Key of tenant {tenant} for the bands up to {ceiling}, now in {file}. It cannot be shown again:")
    print(key)
    _print_reload_note(file)


@app.command("list")
def list_keys(file: FileOption = DEFAULT_FILE) -> None:
    """List the owners of the keys, with the first digits of each key's SHA-256."""
    with _reported_errors():
        owners = read_owners(file.expanduser())
    rows = [
        (
            digest[:_SHOWN_DIGITS],
            owner.tenant,
            owner.ceiling.name.lower(),
            "yes" if owner.is_operator else "-",
            owner.created or "-",
            owner.note or "",
        )
        for digest, owner in owners.items()
    ]
    print_table(("SHA-256", "TENANT", "CEILING", "OPERATOR", "CREATED", "NOTE"), rows)


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key, or the first digits of its SHA-256.")],
    file: FileOption = DEFAULT_FILE,
) -> None:
    """Revoke a key."""
    with _reported_errors(), changed_owners(file) as owners:
        digest = _digest_named(key, owners)
        owner = owners.pop(digest)
    print(f"Revoked {digest[:_SHOWN_DIGITS]} of tenant {owner.tenant}. Keys left in {file}: {len(owners)}.")
    _print_reload_note(file)


def _digest_named(key: str, owners: Mapping[str, KeyOwner]) -> str:
    """Return the digest of the key that is given itself or by its first digits."""
    if digest_of(key) in owners:
        return digest_of(key)
    matching = [digest for digest in owners if digest.startswith(key.lower())] if len(key) >= _MIN_DIGITS else []
    if len(matching) > 1:
        raise ValueError(f"{len(matching)} keys begin with {key}; give more digits")
    if not matching:
        raise ValueError(f"the file has no such key; give the key, or {_MIN_DIGITS} or more digits of its SHA-256")
    return matching[0]


def _print_reload_note(file: Path) -> None:
    path = file.expanduser().resolve()
    stderr().print(f"[dim]A server with api_key_file={path} notices within a second.[/]")


@contextmanager
def _reported_errors() -> Iterator[None]:
    """End the command with a message and exit code 1 if the file cannot be used."""
    try:
        yield
    except Timeout:
        fail("another process has been changing the key file for too long")
    except (ValueError, OSError) as error:
        has_no_file = isinstance(error, FileNotFoundError) and error.filename is not None
        fail(message_of(error) + ("; `headway keys create` makes a key file" if has_no_file else ""))
