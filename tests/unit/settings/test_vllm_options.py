"""Each option of `vllm serve` is accepted under its name, with its effect, or refused with what takes its place.

`python -m tests.unit.settings.test_vllm_options` prints the table.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.main import get_command
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.cli.serve import app as serve_app
from serve_app.config import HeadwayConfig
from serve_app.settings.vllm_options import REFUSED, RENAMED, SHORT_FLAGS, VALUES

NAMES = [
    line for line in Path(__file__).with_name("vllm_options.txt").read_text().split("\n") if line and line[0] != "#"
]
OF_SERVER = {"host", "port", "api_key", "config"}
"""Options of `headway serve` that are no settings."""
ACCEPTED = [(name, value) for name, option in REFUSED.items() for value in sorted(option.accepted)]


def read(**fields: Any) -> HeadwayConfig:
    return HeadwayConfig.model_validate(fields)


def test_every_option_of_vllm_has_its_place() -> None:
    assert len(NAMES) == len(set(NAMES)) > 200
    settings = set(NAMES) & HeadwayConfig.model_fields.keys()
    places = [settings, REFUSED.keys(), RENAMED.keys(), OF_SERVER]
    assert set(NAMES) == set().union(*places) and len(NAMES) == sum(map(len, places))
    assert not (REFUSED.keys() | RENAMED.keys()) & HeadwayConfig.model_fields.keys()
    assert VALUES.keys() | SHORT_FLAGS.keys() - HeadwayConfig.model_fields.keys() <= set(NAMES)


def test_every_option_of_vllm_is_one_of_headway_serve() -> None:
    flags = {flag for parameter in get_command(serve_app).params for flag in parameter.opts}
    assert {f"--{name.replace('_', '-')}" for name in NAMES} | set(SHORT_FLAGS.values()) <= flags


def test_sentences_name_settings_that_exist() -> None:
    sentences = " ".join({option.sentence for option in REFUSED.values()})
    named = set(re.findall(r"(?<![`.\w-])(?:[a-z]+_)+[a-z]+\b(?!\.json)", sentences))
    assert named <= HeadwayConfig.model_fields.keys() | {"tokenizer_info"}


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_what_headway_does_anyway_may_be_asked_for(name: str, value: str) -> None:
    assert read(**{name: value}) == read()


@pytest.mark.parametrize("name", REFUSED)
def test_what_headway_does_not_do_is_refused_with_what_takes_its_place(name: str) -> None:
    option = REFUSED[name]
    for value in {"true", "false", "9"} - option.accepted if option.is_flag else {"9"}:
        with pytest.raises(ValidationError, match=re.escape(f"{name}={value} is refused. {option.sentence}")):
            read(**{name: value})


@pytest.mark.parametrize(("name", "own"), RENAMED.items())
def test_a_setting_has_the_effect_of_vllms_name_of_it(name: str, own: str) -> None:
    assert getattr(read(**{name: "3"}), own) == 3
    with pytest.raises(ValidationError, match=f"{name} is vLLM's name of {own}; both are given"):
        read(**{name: "3", own: "3"})


@pytest.mark.parametrize(
    ("name", "value", "own"), [(name, *pair) for name, values in VALUES.items() for pair in values.items()]
)
def test_a_value_has_the_effect_of_vllms_name_of_it(name: str, value: str, own: str) -> None:
    assert str(getattr(read(**{name: value}), name)) == own


@pytest.mark.parametrize(
    ("text", "count"),
    [("16k", 16_000), ("16K", 16_384), ("25.6k", 25_600), ("1.5m", 1_500_000), ("1M", 2**20), ("640", 640)],
)
def test_a_whole_number_may_have_a_unit(text: str, count: int) -> None:
    for name in ("max_model_len", "max_num_batched_tokens", "max_batch_lines"):
        assert getattr(read(**{name: text}), name) == count
    words = ["serve", "headway-demo", "--max-model-len", text, "--max-num-seqs", "2k", "--max-num-batched-tokens", "1k"]
    refused = CliRunner().invoke(app, words)
    assert "max_num_batched_tokens (1000) must exceed max_num_seqs (2000)" in refused.stderr


def test_a_part_of_a_number_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"1\.0001K is no whole number; did you mean 1\.0001k\?"):
        read(max_model_len="1.0001K")
    for text in ("16kb", "k", "1.5", "-1k"):
        with pytest.raises(ValidationError, match="max_model_len"):
            read(max_model_len=text)


def test_the_format_of_a_checkpoint_is_not_asked_for() -> None:
    with pytest.raises(ValidationError, match="quantization=awq is not needed: the format of quantized weights is"):
        read(quantization="awq")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-pp", "2"], f"pipeline_parallel_size=2 is refused. {REFUSED['pipeline_parallel_size'].sentence}"),
        (["--trust_remote_code"], f"trust_remote_code=true is refused. {REFUSED['trust_remote_code'].sentence}"),
        (["-O3"], f"optimization_level=3 is refused. {REFUSED['optimization_level'].sentence}"),
        (["seed=1"], f"seed=1 is refused. {REFUSED['seed'].sentence}"),
        (["m", "--lora-modules", "a=b", "c=d"], f"lora_modules=a=b is refused. {REFUSED['lora_modules'].sentence}"),
        (["-tp=1", "--enable-auto-tool-choice", "--dtype", "half", "max_num_seqs=0"], None),
    ],
)
def test_the_command_takes_vllms_options(words: list[str], line: str | None) -> None:
    refused = CliRunner().invoke(app, ["serve", *words])
    expected = line or "max_num_seqs: Input should be greater than or equal to 1"
    assert (refused.exit_code, refused.stderr) == (2, f"error: {expected}\n")


def test_a_config_file_takes_vllms_options(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("pipeline-parallel-size: 2\nenable-auto-tool-choice: true\nenable_lora: true\n")
    refused = CliRunner().invoke(app, ["serve", "--config", str(path)])
    assert refused.exit_code == 2
    assert "pipeline_parallel_size=2 is refused." in refused.stderr and "enable_lora=true is refused." in refused.stderr
    assert "enable_auto_tool_choice" not in refused.stderr


def place_of(name: str) -> str:
    """Return what Headway makes of an option."""
    if name in REFUSED:
        accepted = ", ".join(sorted(REFUSED[name].accepted))
        return f"{f'accepted: {accepted}; else r' if accepted else 'R'}efused: {REFUSED[name].sentence}"
    return f"sets {RENAMED[name]}" if name in RENAMED else "accepted"


if __name__ == "__main__":
    for option_name in NAMES:
        print(f"--{option_name.replace('_', '-'):<48}{place_of(option_name)}")
