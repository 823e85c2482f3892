"""Weights of a checkpoint that are read, and dequantized, at the moment they are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from replicas.model.checkpoint.formats import QuantizedWeight, Weights
from replicas.model.checkpoint.headers import StoredTensor
from replicas.model.checkpoint.readers import read_quantized, shape_dense


class LazyWeight:
    """Weight that is read at each `weight[...]`, as transformers does it with slices of a safetensors file."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: object) -> Tensor:
        """Read the whole weight."""
        assert index is Ellipsis
        return self._read()


@contextmanager
def lazy_weights(weights: Weights, dtype: torch.dtype) -> Iterator[dict[str, LazyWeight]]:
    """Give the weights of a checkpoint by name, dense and in `dtype` if they are quantized. Files are open until exit.

    Files are mapped, so only the weights that are being read take memory.
    """
    with ExitStack() as stack:
        files = Files(stack)
        found = {name: LazyWeight(partial(files.read, name, tensor)) for name, tensor in weights.plain.items()}
        for name, weight in weights.quantized.items():
            found[name] = LazyWeight(partial(_read_dense, weight, weights, dtype, files))
        yield found


class Files:
    """Open safetensors files, which `stack` closes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._opened: dict[Path, Any] = {}
        self._lock = Lock()  # transformers reads weights in several threads.

    def read(self, name: str, tensor: StoredTensor) -> Tensor:
        """Read a tensor."""
        with self._lock:
            if tensor.file not in self._opened:
                self._opened[tensor.file] = self._stack.enter_context(safe_open(tensor.file, framework="pt"))
        found: Tensor = self._opened[tensor.file].get_tensor(name)
        return found


def _read_dense(weight: QuantizedWeight, weights: Weights, dtype: torch.dtype, files: Files) -> Tensor:
    assert weights.quantization is not None
    prefix = weight.name.removesuffix(weight.format.dense)
    tensors = {suffix: files.read(prefix + suffix, tensor) for suffix, tensor in weight.parts.items()}
    return shape_dense(weight, read_quantized(weight, tensors, weights.quantization).dense(dtype))
