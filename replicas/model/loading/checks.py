"""Checks of a checkpoint by its files alone. The module imports no torch, so `headway serve` can check at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from replicas.errors import ModelLoadError
from replicas.model.checkpoint.formats import Quantization, Weights, find_weights, read_quantization
from replicas.model.checkpoint.headers import read_headers


def check_config(directory: Path) -> Quantization | None:
    """Check that there is a config, and return the quantization that it describes, if any.

    Raises:
        ModelLoadError: there is no config, it cannot be read, or there is no support for its quantization.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{directory} has no config.json")
    try:
        described = json.loads(path.read_text()).get("quantization_config")
    except (ValueError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a config: {error}") from error
    if not described:
        return None
    if not isinstance(described, dict):
        raise ModelLoadError(f"{path} is not a config: its quantization_config is no object")
    try:
        return read_quantization(described)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{directory} is quantized {error}. Choose the checkpoint before its quantization, or a GGUF file"
        ) from None


def num_weights(directory: Path) -> int:
    """Return the number of weights of a checkpoint, once they are dense.

    Raises:
        ModelLoadError: a file is missing or not whole, or a quantized weight is not.
    """
    return read_weights(directory).num_values


def read_weights(directory: Path) -> Weights:
    """Return the weights of a checkpoint, without reading their values.

    Raises:
        ModelLoadError: a file is missing or not whole, or a quantized weight is not.
    """
    quantization = check_config(directory)
    tensors = read_headers(directory)
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
    config = (directory / "config.json").read_bytes()
    return hashlib.sha256(config + repr(tensors).encode()).hexdigest()
