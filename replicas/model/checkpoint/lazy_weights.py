"""Weights of a checkpoint that are read, and dequantized, at the moment they are taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from replicas.model.checkpoint.cuts import Cutter
from replicas.model.checkpoint.formats import QuantizedWeight, Weights
from replicas.model.checkpoint.headers import StoredTensor
from replicas.model.checkpoint.quantized_linear import QuantizedLinear
from replicas.model.checkpoint.readers import read_quantized, shape_dense


class LazyWeight:
    """Weight that is read at each `weight[...]`, as transformers does it with slices of a safetensors file."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: object) -> Tensor:
        """Read the whole weight."""
        assert index is Ellipsis
        return self._read()


class WeightReader:
    """Reader of the weights of a checkpoint. It opens each file once; files are mapped, and closed with the reader."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype
        self._opened: dict[Path, Any] = {}
        self._lock = Lock()  # transformers reads weights in several threads.

    def lazy(self, cutter: Cutter | None = None) -> dict[str, LazyWeight]:
        """Return all weights by name. Quantized ones are read as dense ones of the reader's dtype.

        Plain weights are cut by `cutter`; None: they are read whole.
        """
        plain, quantized = self._weights.plain, self._weights.quantized
        plain_weights = {name: LazyWeight(partial(self._read_cut, tensor, cutter)) for name, tensor in plain.items()}
        return plain_weights | {
            name: LazyWeight(partial(self._read_dense, weight)) for name, weight in quantized.items()
        }

    def quantized(self, weight: QuantizedWeight) -> QuantizedLinear:
        """Read a quantized weight."""
        assert self._weights.quantization is not None
        tensors = {suffix: self._read(tensor) for suffix, tensor in weight.parts.items()}
        return read_quantized(weight, tensors, self._weights.quantization)

    def _read_dense(self, weight: QuantizedWeight) -> Tensor:
        return shape_dense(weight, self.quantized(weight).dense(self._dtype))

    def _read_cut(self, tensor: StoredTensor, cutter: Cutter | None) -> Tensor:
        cut = None if cutter is None else cutter(tensor.name, tensor.shape)
        return self._read(tensor) if cut is None else cut.apply(self._read(tensor))

    def _read(self, tensor: StoredTensor) -> Tensor:
        with self._lock:
            if tensor.file not in self._opened:
                self._opened[tensor.file] = safe_open(tensor.file, framework="pt")
        view: Tensor = self._opened[tensor.file].get_tensor(tensor.name)
        return view.data  # A view refers to the mapped file, even after its numbers have been moved.
