"""Choice of the device and the dtype."""

from __future__ import annotations

from pathlib import Path

import torch

from replicas.errors import ModelLoadError
from replicas.model.hardware.processor import CPU_INFO, has_bfloat16

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def choose_device(name: str) -> torch.device:
    """Return the device for `name` (auto, cpu or cuda); auto is cuda if there is a CUDA device, else cpu.

    Raises:
        ModelLoadError: `name` is another word, or it is cuda and there is no CUDA device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ModelLoadError(f"device is {name!r}; it must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("device is 'cuda', but torch finds no CUDA device here")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def compute_capability(device: torch.device) -> int:
    """Return the compute capability of a GPU, such as 90 for 9.0; also 90 where there is none, for an interpreter."""
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability(device) if has_gpu else (9, 0)
    return 10 * major + minor


def choose_dtype(name: str, device: torch.device, cpu_info: Path = CPU_INFO) -> torch.dtype:
    """Return the dtype for `name`; auto is bfloat16 if the hardware computes it natively, else its fastest dtype.

    A GPU without bfloat16 gets float16, a CPU without it float32.

    Raises:
        ModelLoadError: there is no such dtype.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise ModelLoadError(f"dtype is {name!r}; it must be auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    return torch.bfloat16 if has_bfloat16(cpu_info) else torch.float32


def choose_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache for `name`, for a model that computes in `dtype`; auto is `dtype`.

    Raises:
        ModelLoadError: there is no such dtype.
    """
    dtypes = {"auto": dtype, **_CACHE_DTYPES}
    if name not in dtypes:
        raise ModelLoadError(f"kv_cache_dtype is {name!r}; it must be one of {', '.join(dtypes)}")
    return dtypes[name]


def cache_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a KV cache's dtype for people: fp8, or torch's."""
    names = (name for name, cache_dtype in _CACHE_DTYPES.items() if cache_dtype == dtype)
    return next(names, str(dtype).removeprefix("torch."))
