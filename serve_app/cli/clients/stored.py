"""Command `headway stored`: sizes of what tenants have stored, and its deletion."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote

import typer

from serve_app.cli.clients.client import DEFAULT_URL, KeyOption, UrlOption, connected
from serve_app.cli.clients.events import JsonObject
from serve_app.cli.clients.terminal import counted, duration_text, print_table

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Stored responses and conversations of a server's tenants."
)


@app.command("list")
def list_sizes(url: UrlOption = DEFAULT_URL, api_key: KeyOption = None) -> None:
    """List what each tenant has stored, most bytes first; a key without `operator` shows its own tenant."""
    with connected(url, api_key) as client:
        given = client.json("GET", "/v1/stored")
        now, limit = time.time(), given["max_stored_bytes"]
        sizes = sorted(given["data"], key=lambda size: -size["num_bytes"])
        headings = ("TENANT", "RESPONSES", "CONVERSATIONS", "MIB", "OF LIMIT", "OLDEST RESPONSE")
        print_table(headings, [_row(size, limit, now) for size in sizes])


@app.command()
def delete(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Delete all stored responses and conversations of a tenant; what runs is stopped. It needs an operator's key."""
    with connected(url, api_key) as client:
        size = client.json("DELETE", f"/v1/stored/{quote(tenant, safe='')}")
        what = f"{counted(size['num_responses'], 'response')} and {counted(size['num_conversations'], 'conversation')}"
        print(f"Deleted {what} of tenant {size['tenant']}.")


def _row(size: JsonObject, max_bytes: int, now: float) -> tuple[str, ...]:
    oldest = size["oldest_response_at"]
    return (
        size["tenant"],
        f"{size['num_responses']:,}",
        f"{size['num_conversations']:,}",
        f"{size['num_bytes'] / 2**20:,.1f}",
        f"{100 * size['num_bytes'] / max_bytes:.0f} %",
        "-" if oldest is None else f"{duration_text(max(0.0, now - oldest))} ago",
    )
