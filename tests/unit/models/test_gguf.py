"""GGUF files: each is converted once, to the weights and the tokenizer that it holds."""

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

from replicas.errors import ModelLoadError
from replicas.text.tokenizer_files import load_tokenizer
from serve_app.models.gguf import conversion_step
from serve_app.models.local_models import local_checkpoint
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.model.tiny_gguf import write_gguf

pytestmark = pytest.mark.rotated


def test_a_converted_file_has_its_weights_and_its_tokenizer(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "original")
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint)
    converted = Path(local_checkpoint(str(file), tmp_path / "cache"))
    expected, found = (load_file(directory / "model.safetensors") for directory in (checkpoint, converted))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values.to(torch.bfloat16)), name
    text = "def quicksort(values):"
    assert load_tokenizer(str(converted)).encode(text) == load_tokenizer(str(checkpoint)).encode(text)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [converted.name]
    before = (converted / "model.safetensors").stat().st_mtime_ns
    assert local_checkpoint(str(file), tmp_path / "cache") == str(converted)
    assert (converted / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "damaged.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelLoadError, match=r"cannot convert .*damaged\.gguf"):
        local_checkpoint(str(file), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_the_step_of_a_conversion_is_the_last_bar() -> None:
    errors = io.StringIO()
    assert conversion_step("a warning: 3/4 of it\n") == ""
    bars = [
        ("Converting and de-quantizing GGUF tensors...", 6, "6 of 12 tensors read, 60 s left"),
        ("Loading weights", 3, "3 of 12 tensors read, 180 s left"),
        ("Packing tensors", 9, "9 of 12 tensors packed, 20 s left"),
        ("Writing model shards", 6, "writing"),
    ]
    for title, done, step in bars:
        with tqdm(total=12, desc=title, file=errors, mininterval=0) as bar:
            bar.start_t -= 60
            bar.last_print_t -= 60
            bar.update(done)
            assert conversion_step(errors.getvalue()[-400:]) == f", {step}"


def test_other_models_stay_as_they_are(tmp_path: Path) -> None:
    assert local_checkpoint("organisation/model", tmp_path / "cache") == "organisation/model"
    assert not (tmp_path / "cache").exists()
