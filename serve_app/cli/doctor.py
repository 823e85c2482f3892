"""Command `headway doctor`: says what this machine has, what works, and what to do about the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from replicas.errors import ModelLoadError
from replicas.model.loading.checks import check_config
from serve_app.cli.checks.machine_checks import Check, Status, folder_check, machine_checks
from serve_app.cli.checks.model_checks import diagnosis_checks
from serve_app.cli.clients.client import KeyOption, ServerClient, ServerError, root_of
from serve_app.config import HeadwayConfig
from serve_app.models.local_models import local_checkpoint

_LEAST_JOBS_BYTES = 10**9
_COLORS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Estimate the memory of a model: a directory, GGUF file or hub id."),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, max=8, help="GPUs of one machine that compute the model together.")
    ] = 1,
    url: Annotated[
        str | None, typer.Option("--url", callback=root_of, help="Check a running server, too.", show_default=False)
    ] = None,
    api_key: KeyOption = None,
    port: Annotated[int, typer.Option(help="Port that the server is to use.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check this machine, and estimate a model's memory; the exit code is 1 if something will not work."""
    console = Console(highlight=False, soft_wrap=True)
    checks: list[Check] = []
    for check in _checks(model, tensor_parallel_size, url, api_key, port):
        checks.append(check)
        if not as_json:
            _show(check, console)
    if as_json:
        print(json.dumps([_as_object(check) for check in checks], indent=2, ensure_ascii=False))
    if any(check.status is Status.FAIL for check in checks):
        raise typer.Exit(1)


def _checks(model: str | None, num_ranks: int, url: str | None, api_key: str | None, port: int) -> Iterator[Check]:
    yield from machine_checks(port)
    yield folder_check("jobs", Path(HeadwayConfig().data_dir), _LEAST_JOBS_BYTES)
    directory: Path | None = None
    if model is not None:
        try:
            directory = _directory_of(model)
            check_config(directory)
        except ModelLoadError as error:
            yield Check("model", Status.FAIL, str(error), "name another model, or fetch it with `headway models pull`")
            directory = None
    yield from diagnosis_checks(directory, num_ranks)
    if url is not None:
        yield _server_check(url, api_key)


def _directory_of(model: str) -> Path:
    """Return the directory of a model that is on this machine; nothing is fetched, but a GGUF file is converted.

    Raises:
        ModelLoadError: it is not here.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    path = HeadwayConfig(model=local_checkpoint(model)).model_path
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(f"{model} is not on this machine") from error


def _server_check(url: str, api_key: str | None) -> Check:
    client = ServerClient(url, api_key)
    try:
        return Check("server", Status.OK, f"{url} serves {', '.join(client.models())}")
    except ServerError as error:
        return Check(
            "server", Status.FAIL, error.message, "start it with `headway serve`, or check --url and --api-key"
        )
    finally:
        client.close()


def _show(check: Check, console: Console) -> None:
    color = _COLORS[check.status]
    console.print(f"[{color}]{check.status.value:<5}[/]", end="")
    console.print(f"{check.name:<19}{check.finding}", markup=False)
    if check.advice:
        console.print(f"{'':<24}{check.advice}", markup=False)


def _as_object(check: Check) -> dict[str, str]:
    return {"name": check.name, "status": check.status.value, "found": check.finding, "advice": check.advice}
