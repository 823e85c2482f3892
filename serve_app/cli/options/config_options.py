"""Options of `headway serve`: one for each field of the configuration, also in a file or as `key=value`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml

from serve_app.config import HeadwayConfig
from serve_app.config_page import default_text, effect_of, form_of, sections
from serve_app.preflight.fields import ConfigError, read_fields, unknown_field
from serve_app.settings.by_band import as_text
from serve_app.settings.replaced import REPLACED
from serve_app.settings.vllm_options import REFUSED, RENAMED, SHORT_FLAGS, read_vllm_options

_RECEIVER = "fields"
"""Parameter of a command that receives the fields that were given."""


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of `HeadwayConfig`; its parameter `fields` receives the given ones.

    Typer reads a command's options from its signature, so the returned function has one with all of them.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != _RECEIVER]
    options = [_option(name, title) for title, names in sections().items() for name in names]
    options += [_hidden_option(name) for name in (*REPLACED, *RENAMED, *REFUSED)]

    @functools.wraps(command)
    def with_fields(**values: Any) -> None:
        fields = {option.name: values.pop(option.name) for option in options}
        command(fields={name: value for name, value in fields.items() if value not in (None, [])}, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [*(parameter.replace(kind=keyword) for parameter in own), *options]
    with_fields.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_fields


def _option(name: str, panel: str) -> inspect.Parameter:
    """Return the option of a field: a pair of flags for a yes or no, else an option with a value."""
    kinds = get_args(HeadwayConfig.model_fields[name].annotation) or (HeadwayConfig.model_fields[name].annotation,)
    kind: Any = str
    if bool in kinds:
        kind = bool
    elif name == "served_model_name":
        kind = list[str]
    help_text = f"{effect_of(name)} Default: {default_text(name)}."
    option = typer.Option(
        *_flags(name, kind), help=help_text, rich_help_panel=panel, metavar=_metavar(name), show_default=False
    )
    return _parameter(name, kind, option)


def _hidden_option(name: str) -> inspect.Parameter:
    """Return the option of a former setting, or of vLLM's, which the configuration refuses or reads in its own way."""
    kind = bool if name in REFUSED and REFUSED[name].is_flag else str
    return _parameter(name, kind, typer.Option(*_flags(name, kind), hidden=True))


def _flags(name: str, kind: type) -> list[str]:
    flag = "--" + name.replace("_", "-")
    flags = [f"{flag}/--no-{flag[2:]}" if kind is bool else flag]
    return [*flags, SHORT_FLAGS[name]] if name in SHORT_FLAGS else flags


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(name: str) -> str | None:
    """Return the placeholder of a field's value in the help; None for flags."""
    annotation = HeadwayConfig.model_fields[name].annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if name.endswith("_bytes"):
        return "SIZE"
    if form_of(name) is not None:
        return form_of(name)
    return {bool: None, int: "INTEGER", float: "NUMBER"}.get(kinds[0], "TEXT")


def read_config(arguments: Iterable[str], fields: dict[str, Any]) -> HeadwayConfig:
    """Return the configuration of a command line: arguments `MODEL` and `key=value`, and the fields given as options.

    Raises:
        ConfigError: naming what is wrong.
    """
    try:
        read_vllm_options(fields)  # before the words: some options there have several values
    except ValueError as error:
        raise ConfigError(str(error)) from None
    pairs: dict[str, Any] = {}
    for name, value in map(_pair, arguments):
        if name in pairs or name in fields:
            raise ConfigError(f"{name} is given twice")
        pairs[name] = value
    names = fields.get("served_model_name")
    if isinstance(names, list):
        fields = {**fields, "served_model_name": ",".join(names)}
    return read_fields(pairs | fields)


def _pair(argument: str) -> tuple[str, str]:
    name, separator, value = argument.partition("=")
    if not separator:
        return "model", argument
    if not value:
        raise ConfigError(f"'{argument}' is not of the form key=value")
    return name.replace("-", "_"), value


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the fields in a YAML file the defaults of the command's options; the command line wins over the file.

    Raises:
        ConfigError: the file is not a mapping of options to values.
    """
    if path is None:
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must map fields to values, such as `max_num_seqs: 64`")
    if "applications" in content:
        raise ConfigError(f"{path} is a config file of Ray Serve: deploy it with `serve deploy`, or give its args")
    known = {parameter.name or "": getattr(parameter, "hidden", False) for parameter in context.command.params}
    given = {str(name).replace("-", "_"): value for name, value in content.items()}
    for name, value in given.items():
        if name not in known:
            shown = [name for name, is_hidden in known.items() if not is_hidden]
            raise ConfigError(f"{path}: {unknown_field(name, shown)}")
        has_parts = name in HeadwayConfig.model_fields and form_of(name) is not None
        if not has_parts and (isinstance(value, dict) or (isinstance(value, list) and name != "served_model_name")):
            raise ConfigError(f"{path}: {name} must have one value")
    context.default_map = {name: _as_given(name, value) for name, value in given.items()}
    return path


def _as_given(name: str, value: object) -> object:
    """Return a value of YAML as on the command line."""
    if name == "served_model_name":
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return as_text(value) if value is None or isinstance(value, dict | list) else value
