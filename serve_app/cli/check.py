"""Command `headway check`: makes the checks of an update without making it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml

from serve_app.preflight.fields import ConfigError, read_fields
from serve_app.preflight.machine import Finding

_BUILDERS = ("headway:build", "serve_app.app:build")


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Config file of Ray Serve, as for `serve deploy`.")],
    only_fields: Annotated[
        bool, typer.Option("--only-fields", help="Check no files, such as on a machine without the model.")
    ] = False,
) -> None:
    """Check a config file, and the files and the memory that it needs; the exit code is 1 if it would be refused.

    On a machine of a Ray cluster every node is checked, else this machine alone.
    """
    has_fault = False
    for name, fields in _applications(config).items():
        for finding in _findings(fields, only_fields):
            has_fault |= finding.fault is not None
            print(f"{name}: {finding.field}: {finding.fault or 'ok'}", flush=True)
    raise typer.Exit(int(has_fault))


def _applications(path: Path) -> dict[str, dict[str, Any]]:
    """Return the fields of each application of Headway in a config file of Serve, by name."""
    import pydantic
    from ray.serve.schema import ServeDeploySchema  # only here, since Ray's import takes seconds

    try:
        schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except pydantic.ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}".lstrip(": ") for one in error.errors())
        _fail(f"{path} is not a config file of Ray Serve: {faults}")
    except (OSError, ValueError, yaml.YAMLError) as error:
        _fail(f"{path} cannot be read: {' '.join(str(error).split())}")
    applications = {one.name: one.args for one in schema.applications if one.import_path in _BUILDERS}
    if not applications:
        _fail(f"{path} has no application with the import_path {_BUILDERS[0]}")
    return applications


def _findings(fields: Mapping[str, Any], only_fields: bool) -> Iterator[Finding]:
    try:
        config = read_fields(fields)
    except ConfigError as error:
        yield Finding("fields", str(error))
        return
    yield Finding("fields", None)
    if not only_fields:
        from serve_app.deployments.autoscaling import joined_cluster, with_gpus
        from serve_app.deployments.rollout import rollout_findings

        with joined_cluster() as has_cluster:
            yield from rollout_findings(with_gpus(config), fields, has_cluster)


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
