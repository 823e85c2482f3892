"""Command `headway batch`: submit a file of requests as a batch, show it, wait for it, cancel it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.cli.batch_client import BatchClient, JsonObject, ServerError
from serve_app.cli.batch_progress import BatchProgress

FINAL = ("completed", "failed", "expired", "cancelled")
RETRY_LIMIT_S = 120.0
"""Time for which `wait` retries while the server does not answer, seconds; the server may be restarting."""
_MAX_SHOWN_ERRORS = 10

UrlOption = Annotated[str, typer.Option("--url", envvar="HEADWAY_URL", help="URL of the server.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="HEADWAY_API_KEY", help="API key, if the server requires one.", show_envvar=True),
]
BatchArgument = Annotated[str, typer.Argument(metavar="ID", help="The batch's id.")]
OutputOption = Annotated[Path | None, typer.Option("--output", help="File for the results.", dir_okay=False)]
ErrorsOption = Annotated[Path | None, typer.Option("--errors", help="File for the failed requests.", dir_okay=False)]
PollOption = Annotated[float, typer.Option("--poll-every", min=0.01, help="Seconds between two polls.")]
DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Batches of requests in JSON-lines files.")


@app.command()
def submit(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", exists=True, dir_okay=False, readable=True, help="JSON-lines file, one request per line."
        ),
    ],
    endpoint: Annotated[str, typer.Option(help="Endpoint of the requests.")] = "/v1/chat/completions",
    window: Annotated[str, typer.Option(help="Completion window, such as 24h, 30m or 90s.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Metadata of the batch; may be repeated.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended.")] = False,
    output: OutputOption = None,
    errors: ErrorsOption = None,
    poll_every: PollOption = 1.0,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Upload FILE, create a batch from it and print the batch's id."""
    if (output or errors) and not wait:
        raise typer.BadParameter("--output and --errors need --wait")
    pairs = _pairs(metadata or [])
    with _client(url, api_key) as client:
        batch = client.submit(client.upload(file)["id"], endpoint, window, pairs)
        print(batch["id"], flush=True)
        if wait:
            _finish(client, _ended(client, batch["id"], poll_every), output, errors)


@app.command()
def status(batch_id: BatchArgument, url: UrlOption = DEFAULT_URL, api_key: KeyOption = None) -> None:
    """Print the status of a batch."""
    with _client(url, api_key) as client:
        _describe(client.batch(batch_id), Console(highlight=False, soft_wrap=True))


@app.command("wait")
def wait_for(
    batch_id: BatchArgument,
    output: OutputOption = None,
    errors: ErrorsOption = None,
    poll_every: PollOption = 1.0,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Show a batch's progress until the batch has ended; the exit code is 0 if it completed."""
    with _client(url, api_key) as client:
        _finish(client, _ended(client, batch_id, poll_every), output, errors)


@app.command()
def cancel(batch_id: BatchArgument, url: UrlOption = DEFAULT_URL, api_key: KeyOption = None) -> None:
    """Cancel a batch; its existing results are kept."""
    with _client(url, api_key) as client:
        _describe(client.cancel(batch_id), Console(highlight=False, soft_wrap=True))


@contextmanager
def _client(url: str, api_key: str | None) -> Iterator[BatchClient]:
    """Give a client whose failures end the command with a message and exit code 1."""
    client = BatchClient(url, api_key)
    try:
        yield client
    except (ServerError, OSError) as error:
        _stderr().print(f"error: {error.message if isinstance(error, ServerError) else error}", markup=False)
        raise typer.Exit(1) from None
    finally:
        client.close()


def _ended(client: BatchClient, batch_id: str, poll_every_s: float) -> JsonObject:
    """Wait until the batch has ended and return it; show its progress, and retry while the server does not answer."""
    with BatchProgress(_stderr()) as progress:
        silent_since_s: float | None = None
        while True:
            try:
                batch = client.batch(batch_id)
            except ServerError as error:
                now_s = time.monotonic()
                silent_since_s = now_s if silent_since_s is None else silent_since_s
                if not error.may_pass or now_s - silent_since_s > RETRY_LIMIT_S:
                    raise
                progress.show_trouble(error.message)
            else:
                silent_since_s = None
                progress.show(batch)
                if batch["status"] in FINAL:
                    return batch
            time.sleep(poll_every_s)


def _finish(client: BatchClient, batch: JsonObject, output: Path | None, errors: Path | None) -> None:
    """Save an ended batch's results and print its summary; exit with code 1 if it did not complete."""
    for path, field in ((output, "output_file_id"), (errors, "error_file_id")):
        if path is not None and batch[field] is not None:
            client.download(batch[field], path)
    _describe(batch, _stderr())
    if batch["status"] != "completed":
        raise typer.Exit(1)


def _describe(batch: JsonObject, console: Console) -> None:
    counts = batch["request_counts"]
    lines: list[tuple[str, Any]] = [
        ("batch", batch["id"]),
        ("status", batch["status"]),
        ("requests", f"{counts['completed']} completed, {counts['failed']} failed, of {counts['total']}"),
        ("results", batch["output_file_id"]),
        ("failures", batch["error_file_id"]),
        ("seconds left", batch.get("eta_seconds")),
    ]
    for name, value in lines:
        if value is not None:
            console.print(f"{name:<13}{value}", markup=False)
    found = (batch["errors"] or {}).get("data") or []
    for error in found[:_MAX_SHOWN_ERRORS]:
        place = "" if error["line"] is None else f"line {error['line']}: "
        console.print(f"error: {place}{error['message']}", markup=False)
    if len(found) > _MAX_SHOWN_ERRORS:
        console.print(f"... and {len(found) - _MAX_SHOWN_ERRORS} more errors", markup=False)


def _stderr() -> Console:
    """Return a console on stderr, for output that scripts do not read."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = dict(text.split("=", 1) for text in texts if "=" in text)
    wrong = next((text for text in texts if "=" not in text), None)
    if wrong is not None:
        raise typer.BadParameter(f"'{wrong}' is not of the form key=value")
    return pairs
