"""A model's generation_config.json fills in what a request leaves out, and nothing else."""

import json
from pathlib import Path

import pytest

from replicas.errors import ModelLoadError
from serve_app.openai.request.sampling_defaults import SamplingDefaults
from serve_app.openai.request.schema import CompletionBody


def body(**fields: object) -> CompletionBody:
    return CompletionBody.model_validate({"model": "m", "prompt": "p", **fields})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 2, "do_sample": True, "min_p": None})
    )
    return tmp_path


def test_defaults_fill_in_missing_fields(model: Path) -> None:
    filled = SamplingDefaults.load(str(model)).apply(body(top_k=5, min_p=None))
    assert (filled.temperature, filled.top_k, filled.min_p, filled.top_p) == (0.6, 5, 0.0, 1.0)


@pytest.mark.parametrize("given", [0.0, 1.0])
def test_a_value_that_the_request_gives_stays(model: Path, given: float) -> None:
    assert SamplingDefaults.load(str(model)).apply(body(temperature=given)).temperature == given


def test_vllm_means_the_defaults_of_the_api(model: Path) -> None:
    assert SamplingDefaults.load(str(model), "vllm").apply(body()).temperature == 1.0


def test_a_folder_has_the_defaults_in_place_of_the_model(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    with pytest.raises(ModelLoadError, match=r"it must be auto, vllm or a folder with generation_config.json"):
        SamplingDefaults.load(str(model), str(folder))
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "max_new_tokens": 9}')
    filled = SamplingDefaults.load(str(model), str(folder)).apply(body())
    assert (filled.temperature, filled.top_k) == (0.3, body().top_k)


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert SamplingDefaults.load(str(tmp_path)).apply(body()).temperature == 1.0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"temperature": 9}', "`temperature` must be at most 2; got 9"),
        ("{", "not a generation config"),
        ("[]", "not a generation config"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(model: Path, content: str, reason: str) -> None:
    (model / "generation_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=reason):
        SamplingDefaults.load(str(model))
