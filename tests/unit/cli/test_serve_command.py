"""`headway serve` reads its options, refuses mistakes at once, and warns of an address that others reach."""

import socket
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from router.scaling.autoscaling import DownscaleDelay
from router.types import LatencyTargets
from serve_app.cli.main import app
from serve_app.cli.options.config_options import read_config, read_config_file, with_config_options
from serve_app.cli.options.serve_command import ServeCommand, with_dashes
from serve_app.cli.serve import is_loopback
from serve_app.cli.server.ports import Address, reserved
from serve_app.config import HeadwayConfig
from serve_app.settings.by_band import BandTargets, BandWaits
from serve_app.settings.replaced import REPLACED
from testkit.free_port import free_port


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("no-such-host.invalid", False),
    ],
)
def test_loopback_addresses_are_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def warning_of(*arguments: str) -> str:
    """Return the warnings that the command prints before it fails at a taken port."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        result = CliRunner().invoke(app, ["serve", "--port", str(taken.getsockname()[1]), *arguments])
    assert "cannot listen on" in result.stderr
    return "".join(line for line in result.stderr.splitlines() if line.startswith("warning:"))


def test_an_open_port_without_keys_is_warned_of_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("{}")
    assert "neither --api-key nor api_key_file is set" in warning_of("--host", "0.0.0.0")
    assert warning_of("--host", "0.0.0.0", f"api_key_file={keys}") == ""
    assert warning_of("--host", "127.0.0.1") == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["max_num_sequences=4"], "there is no field max_num_sequences; did you mean max_num_seqs?"),
        (["max_num_seqs=lots"], "max_num_seqs: Input should be a valid integer"),
        (["max_num_seqs="], "'max_num_seqs=' is not of the form key=value"),
        (["--max-num-seqs", "lots"], "max_num_seqs: Input should be a valid integer"),
        (["--max-num-sequences", "4"], "No such option: --max-num-sequences"),
        (["max_choices=none"], "max_choices is no longer a setting. A request always has at most 128 choices"),
        (["--max-choices", "3"], "max_choices is no longer a setting. A request always has at most 128 choices"),
        (["--max-num-seqs", "4", "max_num_seqs=4"], "max_num_seqs is given twice"),
        (["a-model", "--model", "b-model"], "model is given twice"),
        (["--max-num-batched-tokens", "32"], "max_num_batched_tokens (32) must exceed max_num_seqs (32)"),
        (["model=/no/such/model"], "there is no directory /no/such/model"),
        (["model=README.md"], "README.md is a file and no checkpoint; name a directory, a .gguf file or a hub id"),
    ],
)
def test_a_mistake_in_an_argument_is_refused(arguments: list[str], message: str) -> None:
    assert message in error_of(*arguments)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json" in error_of(f"model={tmp_path}")


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in error_of("--port", str(port))


@pytest.mark.parametrize("profile", ["default", "throughput"])
def test_the_port_of_a_server_that_starts_is_refused_in_one_line(profile: str) -> None:
    address = Address("127.0.0.1", free_port("127.0.0.1"))
    with reserved(address):
        refused = CliRunner().invoke(app, ["serve", "--port", str(address.port), "--profile", profile])
    assert refused.exit_code == 2
    reason = "Address already in use; choose another port with --port (make: PORT=...)"
    assert refused.stderr == f"error: cannot listen on {address}: {reason}\n"


def error_of(*arguments: str) -> str:
    """Return the text that the command prints when it refuses to start. Its default port may be taken here."""
    result = CliRunner().invoke(app, ["serve", "--port", str(free_port("127.0.0.1")), *arguments])
    assert result.exit_code == 2
    return result.stderr


def read_by_the_command(*arguments: str) -> HeadwayConfig:
    """Return the configuration of a command line."""
    read: list[HeadwayConfig] = []

    program = typer.Typer()

    @program.command(cls=ServeCommand, context_settings={"token_normalize_func": with_dashes})
    @with_config_options
    def command(
        fields: dict[str, Any],
        arguments: Annotated[list[str] | None, typer.Argument()] = None,
        config: Annotated[Path | None, typer.Option(callback=read_config_file, is_eager=True)] = None,
        port: int = 8000,
    ) -> None:
        read.append(read_config(arguments or [], fields))

    result = CliRunner().invoke(program, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return read[0]


def test_each_field_is_an_option_with_its_docstring() -> None:
    shown = " ".join(CliRunner().invoke(app, ["serve", "--help-all"], env={"COLUMNS": "400"}).stdout.split())
    for name, field in HeadwayConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert " ".join((field.description or "").split())[:60] in shown
    assert not [name for name in REPLACED if f"--{name.replace('_', '-')}" in shown.split()]


@pytest.mark.parametrize("name", REPLACED)
def test_the_option_of_a_former_setting_is_refused_with_what_replaces_it(name: str) -> None:
    refused = CliRunner().invoke(app, ["serve", f"--{name.replace('_', '-')}", "none"])
    assert (refused.exit_code, refused.stderr) == (2, f"error: {name} is no longer a setting. {REPLACED[name]}\n")


@pytest.mark.parametrize(
    ("words", "model", "names"),
    [
        ("m --served-model-name a", "m", ("a",)),
        ("m --served-model-name a b c --max-num-seqs 4", "m", ("a", "b", "c")),
        ("m --served-model-name a b max_num_seqs=4", "m", ("a", "b")),
        ("--model m --served_model_name a b", "m", ("a", "b")),
        ("m --served-model-name a --served-model-name b", "m", ("a", "b")),
        ("--served-model-name a m", "m", ("a",)),
        ("--served-model-name a,b m", "m", ("a", "b")),
    ],
)
def test_the_model_may_have_several_names(words: str, model: str, names: tuple[str, ...]) -> None:
    config = read_by_the_command(*words.split())
    assert (config.model, config.model_names) == (model, names)


def test_options_set_fields_of_every_kind() -> None:
    config = read_by_the_command(
        *("--max-num-seqs", "4", "--kv-cache-bytes", "64MiB", "--dtype", "float32", "--no-enable-prefix-caching"),
        *("--max-wait-s", "standard=none", "slo=batch=60/none", "num_replicas=2", "org/model"),
    )
    assert (config.max_num_seqs, config.kv_cache_bytes, config.dtype) == (4, 64 * 2**20, "float32")  # type: ignore[attr-defined]
    assert config.enable_prefix_caching is False  # type: ignore[attr-defined]
    assert (config.max_wait_s, config.slo) == (BandWaits(standard=None), BandTargets(batch=LatencyTargets(60.0)))
    assert (config.num_replicas, config.model) == (2, "org/model")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--served-model-name", "a", "--served-model-name", "b"),
        ("--served-model-name", "a,b"),
        ("served_model_name=a b",),
    ],
)
def test_a_model_may_have_several_names(arguments: tuple[str, ...]) -> None:
    config = read_by_the_command(*arguments)
    assert (config.model_name, config.model_names) == ("a", ("a", "b"))


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "headway.yaml"
    file.write_text("max_num_seqs: 4\nnum_replicas: 3\nport: 9000\nserved_model_name: [a, b]\n")
    with file.open("a") as text:
        text.write("max-wait-s: {standard:}\nslo: {batch: [60, none]}\ndownscale_delay_s: [5, 9]\n")
    config = read_by_the_command("--config", str(file), "--num-replicas", "2")
    assert (config.num_replicas, config.max_num_seqs) == (2, 4)  # type: ignore[attr-defined]
    assert (config.max_wait_s, config.slo) == (BandWaits(standard=None), BandTargets(batch=LatencyTargets(60.0)))
    assert config.downscale_delay_s == DownscaleDelay(5.0, 9.0)  # type: ignore[attr-defined]
    assert config.model_names == ("a", "b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seq: 4", "there is no field max_num_seq; did you mean max_num_seqs?"),
        ("- 4", "must map fields to values"),
        ("a: [", "cannot be read"),
        ("applications: []", "is a config file of Ray Serve"),
        ("max_num_seqs: [1, 2]", "max_num_seqs must have one value"),
        ("slo: {interactive: [0, 1]}", "slo of interactive: ttft_s is 0; it must be a number above 0, or none"),
        ("max_choices:", "max_choices is no longer a setting. A request always has at most 128 choices"),
    ],
)
def test_a_mistake_in_the_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "headway.yaml"
    file.write_text(content)
    assert message in error_of("--config", str(file))


def test_a_key_and_a_key_file_contradict_each_other(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("{}")
    assert f"api_key_file ({keys}) are both given" in error_of("--api-key", "secret", f"api_key_file={keys}")
