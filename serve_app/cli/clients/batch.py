"""Command `headway batch`: submit a file of requests as a batch, follow it, fetch its results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serve_app.cli.clients.client import (
    DEFAULT_URL,
    KeyOption,
    ServerClient,
    ServerError,
    UrlOption,
    connected,
)
from serve_app.cli.clients.events import JsonObject
from serve_app.cli.clients.terminal import date_text, duration_text, print_table, stderr

FINAL = ("completed", "failed", "expired", "cancelled")
RETRY_LIMIT_S = 120.0
"""Time for which `wait` retries while the server does not answer, seconds; the server may be restarting."""
_MAX_SHOWN_ERRORS = 10
_PAGE = 100

BatchArgument = Annotated[str, typer.Argument(metavar="ID", help="The batch's id.")]
OutputOption = Annotated[Path | None, typer.Option("--output", help="File for the results.", dir_okay=False)]
ErrorsOption = Annotated[Path | None, typer.Option("--errors", help="File for the failed requests.", dir_okay=False)]
PollOption = Annotated[float, typer.Option("--poll-every", min=0.01, help="Seconds between two polls.")]

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


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, help="Most batches shown.")] = 20,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """List the newest batches."""
    with _client(url, api_key) as client:
        print_table(("ID", "STATUS", "DONE", "CREATED", "ENDPOINT"), map(_row, client.latest(limit)))


@app.command()
def download(
    batch_id: BatchArgument,
    output: OutputOption = None,
    errors: ErrorsOption = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Save the results of a batch, by default as ID-output.jsonl and ID-errors.jsonl; print the files' names."""
    with _client(url, api_key) as client:
        batch = client.batch(batch_id)
        chosen = {"output_file_id": output, "error_file_id": errors}
        targets = {field: path for field, path in chosen.items() if path} or _default_targets(batch)
        for field, path in targets.items():
            if batch[field] is None:
                raise ServerError(f"batch {batch_id} has no {field}; its status is {batch['status']}", may_pass=False)
            client.download(batch[field], path)
            print(path)


class BatchClient:
    """Client of the files and batches of one server; every failure of the server is a ServerError."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server

    def upload(self, path: Path) -> JsonObject:
        """Upload a file, read while it is sent, and return its file object."""
        with path.open("rb") as content:
            files = {"file": (path.name, content)}
            return self._server.json("POST", "/v1/files", data={"purpose": "batch"}, files=files)

    def submit(self, file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]) -> JsonObject:
        """Create a batch and return it."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        metadata_field = {"metadata": dict(metadata)} if metadata else {}
        return self._server.json("POST", "/v1/batches", json=body | metadata_field)

    def batch(self, batch_id: str) -> JsonObject:
        """Return a batch in its present state."""
        return self._server.json("GET", f"/v1/batches/{batch_id}")

    def cancel(self, batch_id: str) -> JsonObject:
        """Start the cancellation of a batch and return it."""
        return self._server.json("POST", f"/v1/batches/{batch_id}/cancel")

    def latest(self, limit: int) -> list[JsonObject]:
        """Return the `limit` newest batches, newest first."""
        return list(islice(self._newest_first(min(limit, _PAGE)), limit))

    def download(self, file_id: str, path: Path) -> None:
        """Write a file's content to `path`, atomically."""
        self._server.download(f"/v1/files/{file_id}/content", path)

    def _newest_first(self, page_size: int) -> Iterator[JsonObject]:
        after: dict[str, str] = {}
        while True:
            page = self._server.json("GET", "/v1/batches", params={"limit": page_size, **after})
            yield from page["data"]
            if not page["has_more"]:
                return
            after = {"after": page["last_id"]}


@contextmanager
def _client(url: str, api_key: str | None) -> Iterator[BatchClient]:
    """Give a client whose failures end the command with a message and exit code 1."""
    with connected(url, api_key) as server:
        yield BatchClient(server)


def _ended(client: BatchClient, batch_id: str, poll_every_s: float) -> JsonObject:
    """Wait until the batch has ended and return it; show its progress, and retry while the server does not answer."""
    with _progress_bar() as progress:
        task = progress.add_task("asking", total=None, remark="")
        silent_since_s: float | None = None
        while True:
            try:
                batch = client.batch(batch_id)
            except ServerError as error:
                now_s = time.monotonic()
                silent_since_s = now_s if silent_since_s is None else silent_since_s
                if not error.may_pass or now_s - silent_since_s > RETRY_LIMIT_S:
                    raise
                progress.update(task, remark=error.message)
            else:
                silent_since_s = None
                progress.update(task, **_state_of(batch))
                if batch["status"] in FINAL:
                    return batch
            time.sleep(poll_every_s)


def _finish(client: BatchClient, batch: JsonObject, output: Path | None, errors: Path | None) -> None:
    """Save an ended batch's results and print its summary; exit with code 1 if it did not complete."""
    for path, field in ((output, "output_file_id"), (errors, "error_file_id")):
        if path is not None and batch[field] is not None:
            client.download(batch[field], path)
    _describe(batch, stderr())
    if batch["status"] != "completed":
        raise typer.Exit(1)


def _describe(batch: JsonObject, console: Console) -> None:
    counts = batch["request_counts"]
    left_s = batch.get("eta_seconds")
    lines: list[tuple[str, Any]] = [
        ("batch", batch["id"]),
        ("status", batch["status"]),
        ("requests", f"{counts['completed']} completed, {counts['failed']} failed, of {counts['total']}"),
        ("results", batch["output_file_id"]),
        ("failures", batch["error_file_id"]),
        ("time left", None if left_s is None else f"about {duration_text(left_s)}"),
    ]
    for name, value in lines:
        if value is not None:
            console.print(f"{name:<13}{value}", markup=False)
    errors = (batch["errors"] or {}).get("data") or []
    for error in errors[:_MAX_SHOWN_ERRORS]:
        place = "" if error["line"] is None else f"line {error['line']}: "
        console.print(f"error: {place}{error['message']}", markup=False)
    if len(errors) > _MAX_SHOWN_ERRORS:
        console.print(f"... and {len(errors) - _MAX_SHOWN_ERRORS} more errors", markup=False)


def _default_targets(batch: JsonObject) -> dict[str, Path]:
    """Return a path for the results, and one for the failed requests if there are any."""
    results = {"output_file_id": Path(f"{batch['id']}-output.jsonl")}
    failures = {"error_file_id": Path(f"{batch['id']}-errors.jsonl")}
    if batch["error_file_id"] is None:
        return results
    return failures if batch["output_file_id"] is None else results | failures


def _row(batch: JsonObject) -> tuple[str, ...]:
    counts = batch["request_counts"]
    done = f"{counts['completed'] + counts['failed']} of {counts['total']}"
    failed = f" ({counts['failed']} failed)" if counts["failed"] else ""
    return batch["id"], batch["status"], done + failed, date_text(batch["created_at"]), batch["endpoint"]


def _pairs(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise typer.BadParameter(f"'{text}' is not of the form key=value")
    return dict(text.split("=", 1) for text in texts)


def _progress_bar() -> Progress:
    """Return a progress bar that is redrawn on every change; without a terminal only its last state is printed."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[remark]}"),
        TimeElapsedColumn(),
        console=stderr(),
    )


def _state_of(batch: JsonObject) -> dict[str, Any]:
    """Return the fields of the progress bar for a batch."""
    counts = batch["request_counts"]
    remarks = [f"{counts['failed']} failed"] if counts["failed"] else []
    if batch.get("eta_seconds") is not None:
        remarks.append(f"about {duration_text(batch['eta_seconds'])} left")
    return {
        "description": batch["status"],
        "completed": counts["completed"] + counts["failed"],
        "total": counts["total"] or None,
        "remark": ", ".join(remarks),
    }
