"""Checks of a checkpoint by its files alone. The module imports no torch, so `headway serve` can check at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from replicas.errors import ModelLoadError
from replicas.model.checkpoint.formats import Quantization, Weights, find_weights, read_quantization
from replicas.model.checkpoint.headers import read_headers
from replicas.model.checkpoint.text_part import text_tensors

_CONFIG = "config.json"
_MODELOPT = "hf_quant_config.json"
"""File in which modelopt describes a quantization, older versions of it in this file alone."""


def check_config(directory: Path) -> Quantization | None:
    """Check that there is a config, and return the quantization that it describes, if any.

    Raises:
        ModelLoadError: there is no config, it cannot be read, or there is no support for its quantization.
    """
    config = _read_config(directory)
    described = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    described = described or modelopt_config(directory)
    if not described:
        return None
    if not isinstance(described, dict):
        raise ModelLoadError(f"{directory / _CONFIG} is not a config: its quantization_config is no object")
    try:
        return read_quantization(described)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{directory} is quantized {error}. Choose the checkpoint before its quantization, or a GGUF file"
        ) from None


def modelopt_config(directory: Path) -> dict[str, Any] | None:
    """Return what modelopt's own file describes, as a `quantization_config`; None: weights are not quantized by it.

    Raises:
        ModelLoadError: the file cannot be read.
    """
    if not (directory / _MODELOPT).is_file():
        return None
    described = _read_object(directory / _MODELOPT, "quantization").get("quantization") or {}
    return {**described, "quant_method": "modelopt"} if described.get("quant_algo") else None


def _read_config(directory: Path) -> dict[str, Any]:
    if not (directory / _CONFIG).is_file():
        raise ModelLoadError(f"{directory} has no {_CONFIG}")
    return _read_object(directory / _CONFIG, "text_config")


def _read_object(path: Path, part: str) -> dict[str, Any]:
    """Return the object of a file, whose `part` is an object, too, if it is there."""
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ModelLoadError(f"{path} is not a config: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get(part) or {}, dict):
        raise ModelLoadError(f"{path} is not a config: it, or its {part}, is no object")
    return config


def num_weights(directory: Path) -> int:
    """Return the number of weights of a checkpoint, once they are dense.

    Raises:
        ModelLoadError: a file is missing or not whole, or a quantized weight is not.
    """
    return read_weights(directory).num_values


def read_weights(directory: Path) -> Weights:
    """Return the weights of a checkpoint, without reading their values; of text and images, those of the text part.

    Raises:
        ModelLoadError: a file is missing or not whole, or a quantized weight is not.
    """
    quantization = check_config(directory)
    tensors = text_tensors(read_headers(directory), _read_config(directory).get("model_type"))
    try:
        return find_weights(tensors, quantization)
    except ModelLoadError as error:
        raise ModelLoadError(f"{directory} cannot be read: {error}") from None


def shapes_digest(directory: Path) -> str:
    """Return a digest of a checkpoint's config, and of the names, dtypes and shapes of its tensors.

    Raises:
        ModelLoadError: a file is missing or not whole.
    """
    tensors = sorted((name, tensor.dtype, tensor.shape) for name, tensor in read_headers(directory).items())
    config = (directory / _CONFIG).read_bytes()
    return hashlib.sha256(config + repr(tensors).encode()).hexdigest()
