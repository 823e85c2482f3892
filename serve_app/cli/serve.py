"""Command `headway serve`: reads its options, finds the model, and runs a server in the foreground.

SIGTERM or SIGINT stops everything that it started; a second one does so without waiting for requests.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from replicas.child_processes import machine_slowness, start_timeout_s
from replicas.errors import ModelLoadError
from replicas.model.hardware.limits import cpu_limit
from serve_app.cli.clients.terminal import message_of
from serve_app.cli.options.config_options import read_config, read_config_file, with_config_options
from serve_app.cli.options.serve_command import ServeCommand, show_all, with_dashes
from serve_app.cli.server.access_lines import LogFormat
from serve_app.cli.server.data_folder import own_data_dir
from serve_app.cli.server.disk_space import free_bytes, lack_of_space
from serve_app.cli.server.own_session import run_in_own_session
from serve_app.cli.server.ports import Address, reserved
from serve_app.cli.server.private_cluster import MAX_CONNECTIONS_PER_ADDRESS, StartLimits
from serve_app.cli.server.profile import Profile, choose_front
from serve_app.cli.server.serve_log import new_log_file
from serve_app.cli.server.served_model import kernels_compiled, prepare_model
from serve_app.cli.server.server import ListenOptions, Server
from serve_app.config import HeadwayConfig
from serve_app.one_root import ForeignPackage, check_one_root
from serve_app.preflight.fields import ConfigError
from serve_app.preflight.machine import check_keys, check_text

_LOOPBACK_HOSTS = "localhost,127.0.0.1,[::1]"
_FIELDS_OF_TEXT = {"chat_template", "generation_config", "tool_call_parser"}
"""Fields whose check needs the model's tokenizer, which takes a second to load."""
_KEY_OPTION = "--api-key"
_KEY_VARIABLE = "HEADWAY_API_KEY"


def _use_config_file(context: typer.Context, path: Path | None) -> Path | None:
    try:
        return read_config_file(context, path)
    except ConfigError as error:
        _fail(str(error))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("serve", cls=ServeCommand, context_settings={"token_normalize_func": with_dashes})
@with_config_options
def serve(
    fields: dict[str, Any],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [KEY=VALUE]...", help="Model, and fields of docs/configuration.md."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file of fields; the command line wins over it.",
            callback=_use_config_file,
            is_eager=True,
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="Port to listen on.", min=1, max=65535)] = 8000,
    max_connections_per_address: Annotated[
        int,
        typer.Option(help="Most connections, without HAProxy open requests, of an address that is not local.", min=1),
    ] = MAX_CONNECTIONS_PER_ADDRESS,
    profile: Annotated[
        Profile, typer.Option(help="HAProxy in front for `throughput`, which `auto` takes from 4 processors on.")
    ] = Profile.AUTO,
    api_key: Annotated[
        str | None, typer.Option(_KEY_OPTION, envvar=_KEY_VARIABLE, help="The one API key of the server.")
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the access lines.")] = LogFormat.TEXT,
    access_log: Annotated[bool, typer.Option(help="Print one line for each request.")] = True,
    help_all: Annotated[
        bool, typer.Option("--help-all", callback=show_all, is_eager=True, help="Show every option.")
    ] = False,
) -> None:
    """Serve a model from this machine until SIGTERM or Ctrl-C.

    MODEL is a directory, a GGUF file or a hub id; without it a small default model is served.
    """
    _hide_key()
    limits = StartLimits(machine_slowness())  # before this process waits for others
    _check_environment()
    address, limit = Address(host, port), max_connections_per_address
    checked = _checked(arguments or [], fields, address, api_key)
    front, checked = choose_front(profile, checked, cpu_limit().num_cpus)
    options = ListenOptions(address, limit, front, api_key, log_format, access_log)
    with contextlib.ExitStack() as held:  # by the server's process, too, which is forked
        _reserve(address, held)
        with kernels_compiled(checked):
            checked = _with_model(checked)
        try:
            checked = held.enter_context(own_data_dir(checked, address))
            log_path = held.enter_context(new_log_file(Path(checked.data_dir) / "logs", port))
        except OSError as error:
            _fail(f"cannot write to the data directory: {message_of(error)}; name another one with data_dir=FOLDER")
        _check_space(Path(checked.data_dir))
        raise typer.Exit(run_in_own_session(lambda: Server(checked, options, limits, log_path).run()))


def _checked(arguments: list[str], fields: dict[str, Any], address: Address, api_key: str | None) -> HeadwayConfig:
    """Return the configuration; refuse what contradicts the key, and warn of an address that others reach."""
    try:
        config = read_config(arguments, fields)
    except ConfigError as error:
        _fail(str(error))
    key_file = config.ingress_settings().api_key_file
    if api_key is not None and key_file is not None:
        _fail(f"{_KEY_OPTION} (or {_KEY_VARIABLE}) and api_key_file ({key_file}) are both given; give one of them")
    if key_file is not None:
        try:
            check_keys(Path(key_file))
        except ValueError as error:
            _fail(f"api_key_file: {' '.join(str(error).split())}")
    if is_loopback(address.host):
        given = "allowed_hosts" in config.model_fields_set
        return config if given else config.model_copy(update={"allowed_hosts": _LOOPBACK_HOSTS})
    if key_file is None and api_key is None:
        reached = f"every client that reaches {address} may use the model"
        _warn(f"{reached}: neither {_KEY_OPTION} nor api_key_file is set")
    return config


def _hide_key() -> None:
    """Move an API key from the command line into the environment, by running this program anew.

    Ray shows the command line of its driver in its dashboard, and every user of the machine can list it. The
    environment is the owner's alone; its variable is removed before Ray starts.
    """
    words = sys.orig_argv
    position = next((i for i, word in enumerate(words) if word.split("=", 1)[0] == _KEY_OPTION), None)
    if position is not None:
        _, separator, key = words[position].partition("=")
        rest = words[position + 1 :] if separator else words[position + 2 :]
        key = key if separator else "".join(words[position + 1 : position + 2])
        os.execve(sys.executable, [sys.executable, *words[1:position], *rest], os.environ | {_KEY_VARIABLE: key})
    os.environ.pop(_KEY_VARIABLE, None)


def _check_environment() -> None:
    try:
        start_timeout_s()
        check_one_root(Path.cwd())
        Path.home()
    except (ValueError, ForeignPackage) as error:
        _fail(str(error))
    except RuntimeError:
        _fail("this user has no home directory: set HOME to a folder that can be written")
    limit = cpu_limit()
    if limit.num_cpus < 1:
        _warn(f"{limit.num_cpus:g} of a processor ({limit.source}): a start takes minutes, and answers are slow")


def _with_model(config: HeadwayConfig) -> HeadwayConfig:
    try:
        config = prepare_model(config)
    except (ModelLoadError, OSError) as error:
        _fail(f"model: {error}")
    if config.model_fields_set & _FIELDS_OF_TEXT:
        try:
            check_text(config.model_path, config)
        except ModelLoadError as error:
            _fail(str(error))
    return config


def _reserve(address: Address, held: contextlib.ExitStack) -> None:
    try:
        held.enter_context(reserved(address))
    except OSError as error:
        _fail(f"cannot listen on {address}: {error.strerror}; choose another port with --port (make: PORT=...)")


def _check_space(folder: Path) -> None:
    """Refuse a start whose log and jobs would soon find the disk full."""
    lack = lack_of_space(folder, "data_dir", free_bytes(folder))
    if lack is not None:
        _fail(lack)


def is_loopback(host: str) -> bool:
    """Return True if `host` has only loopback addresses, False if not or if the name is unknown."""
    try:
        addresses = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):
        return False
    return all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(code=2)
