"""Checks of a checkpoint by its files alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replicas.errors import ModelLoadError
from replicas.model.loading.checks import check_config, read_weights
from replicas.model.loading.config import read_config
from testkit.model.tiny_checkpoints import write_checkpoint

Damage = Callable[[Path], object]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def edit(**fields: object) -> Damage:
    def write(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return write


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(shutil.rmtree, "there is no such directory", id="no-directory"),
        pytest.param(edit(model_type="nonesuch"), "model type `nonesuch`", id="architecture"),
        pytest.param(edit(num_attention_heads=5), "not a multiple of the number of attention heads", id="sizes"),
    ],
)
def test_a_config_that_transformers_cannot_use_is_refused(copied: Path, damage: Damage, reason: str) -> None:
    damage(copied)
    with pytest.raises(ModelLoadError, match=reason):
        read_config(str(copied))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda model: (model / "config.json").unlink(), "has no config.json", id="none"),
        pytest.param(lambda model: (model / "config.json").write_text("{"), "is not a config", id="broken"),
        pytest.param(edit(quantization_config={"quant_method": "hqq"}), r"is quantized \(hqq\)", id="quantized"),
    ],
)
def test_a_broken_or_quantized_config_is_refused(copied: Path, damage: Damage, reason: str) -> None:
    damage(copied)
    with pytest.raises(ModelLoadError, match=reason):
        check_config(copied)


def truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def lose_a_part(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-2"}}')


def test_a_single_file_goes_before_the_index_of_an_earlier_model(copied: Path) -> None:
    (copied / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-2"}}')
    assert {tensor.file.name for tensor in read_weights(copied).plain.values()} == {"model.safetensors"}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda model: (model / "model.safetensors").unlink(), "there is no model.safetensors", id="none"),
        pytest.param(truncate, "is truncated or damaged", id="truncated"),
        pytest.param(
            lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
            "pytorch_model.bin cannot be read", id="other-format",
        ),
        pytest.param(lose_a_part, "there is no part-2", id="a-part"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_read_are_refused(copied: Path, damage: Damage, reason: str) -> None:
    damage(copied)
    with pytest.raises(ModelLoadError, match=reason):
        read_weights(copied)
