"""Defaults of sampling that a model brings along in its generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from replicas.errors import ModelLoadError
from replicas.text.tokenizer_files import model_file
from serve_app.openai.request.parsing import invalid_request
from serve_app.openai.request.schema import GenerationBody

Body = TypeVar("Body", bound=GenerationBody)

_FILE = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingDefaults:
    """Values of the sampling fields that a request does not give; fields without a value keep the API's default."""

    SOURCES = ("auto", "vllm")
    """Sources of the values that are no folders."""

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self._values = dict(values or {})

    @classmethod
    def load(cls, model: str, source: str = "auto") -> SamplingDefaults:
        """Read the defaults of `model`, a directory or hub id, or those in the folder `source`.

        `auto` means the model's, `vllm` none, as vLLM's option of this name does.

        Raises:
            ModelLoadError: the file cannot be read, or has a value that no request could give; the folder has none.
        """
        if source in cls.SOURCES:
            path = model_file(model, _FILE) if source == "auto" else None
        else:
            path = Path(source) / _FILE
            if not path.is_file():
                raise ModelLoadError(f"generation_config is {source!r}; it must be auto, vllm or a folder with {_FILE}")
        if path is None:
            return cls()
        try:
            given = json.loads(path.read_text())
            values = {name: given[name] for name in _FIELDS if given.get(name) is not None}
            GenerationBody.model_validate({"model": model, **values})
        except ValidationError as error:
            reason = invalid_request(error.errors(include_url=False)).message
            raise ModelLoadError(f"{path}: {reason}") from error
        except (ValueError, AttributeError) as error:
            raise ModelLoadError(f"{path} is not a generation config: {error}") from error
        return cls(values)

    def apply(self, body: Body) -> Body:
        """Return the body with the defaults in the fields that its sender left out."""
        missing = {name: value for name, value in self._values.items() if name not in body.model_fields_set}
        return body.model_copy(update=missing) if missing else body
