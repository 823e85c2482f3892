"""Checks of a checkpoint by its files alone. The module imports no torch, so `headway serve` can check at once."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from replicas.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16, "I64": 64, "I32": 32}
_GIB = 2**30


def check_config(directory: Path) -> None:
    """Check that there is a config, and that the weights are not quantized.

    Raises:
        ModelLoadError: there is none, it cannot be read, or they are.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{directory} has no config.json")
    try:
        quantization = json.loads(path.read_text()).get("quantization_config")
    except (ValueError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a config: {error}") from error
    if quantization:
        raise ModelLoadError(
            f"{directory} is quantized ({quantization.get('quant_method')}); Headway reads plain weights and GGUF "
            "files. Choose the checkpoint before its quantization, or a GGUF file"
        )


def check_weights(
    directory: Path, value_bytes: int, kv_cache_bytes: int, available_bytes: int, num_replicas: int = 1
) -> None:
    """Check that all weights are there and whole, and that they fit into memory beside the KV cache.

    Each of `num_replicas` needs its own. `value_bytes` is the size of a weight in memory.

    Raises:
        ModelLoadError: they are not, or do not.
    """
    num_values = num_weights(directory)
    needed = num_values * value_bytes + kv_cache_bytes
    if needed * num_replicas > available_bytes:
        each = "" if num_replicas == 1 else f" for each of {num_replicas} replicas"
        raise ModelLoadError(
            f"{directory} needs {needed / _GIB:.1f} GiB{each} ({num_values} weights of {value_bytes} bytes, and "
            f"{kv_cache_bytes / _GIB:.1f} GiB of KV cache); {available_bytes / _GIB:.1f} GiB of memory are free"
        )


def num_weights(directory: Path) -> int:
    """Return the number of weights of a checkpoint.

    Raises:
        ModelLoadError: a file is missing or not whole.
    """
    return sum(map(_num_values, _weight_files(directory)))


def available_memory_bytes() -> int:
    """Return the memory that this process may still take, within the limit of its container."""
    available: int = psutil.virtual_memory().available
    limit, used = (_read_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, limit - used)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # No such limit, or `max`.
        return None


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index} is not an index of weights: {error!r}") from error
    else:
        names = [_WEIGHTS]
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        others = sorted(path.name for path in directory.glob("*.bin")) if missing == [_WEIGHTS] else []
        hint = f"; {', '.join(others)} cannot be read: Headway reads safetensors only" if others else ""
        raise ModelLoadError(f"{directory} lacks its weights: there is no {', '.join(missing)}{hint}")
    return [directory / name for name in names]


def _num_values(file: Path) -> int:
    """Return the number of weights in a safetensors file, whose header must agree with its size."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(stream.read(length))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        expected = _LENGTH_BYTES + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        num_values: int = sum(
            (tensor["data_offsets"][1] - tensor["data_offsets"][0]) * 8 // _BITS.get(tensor["dtype"], 8)
            for tensor in tensors
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file} is not a safetensors file: {error}") from error
    size = file.stat().st_size
    if size != expected:
        raise ModelLoadError(f"{file} is truncated or damaged: it has {size:,} bytes, its header says {expected:,}")
    return num_values
