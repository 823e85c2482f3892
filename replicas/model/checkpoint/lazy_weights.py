"""Weights of a checkpoint that are read, and dequantized, at the moment they are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from replicas.model.checkpoint.formats import Cut, QuantizedWeight, Weights
from replicas.model.checkpoint.headers import StoredTensor
from replicas.model.checkpoint.quantized_linear import QuantizedLinear, concatenate
from replicas.model.checkpoint.readers import read_quantized, shape_dense
from replicas.model.checkpoint.weight_parts import StoredSlice, is_cut_when_stored


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

    def lazy(self) -> dict[str, LazyWeight]:
        """Return all weights by name. Quantized ones are read as dense ones of the reader's dtype."""
        names = (*self._weights.plain, *self._weights.quantized)
        return {name: LazyWeight(partial(self._read_weight, name)) for name in names}

    def quantized(self, weight: QuantizedWeight) -> QuantizedLinear:
        """Read a quantized weight, or the part of it that a rank holds."""
        if weight.part is None:
            tensors = {suffix: self._read(tensor) for suffix, tensor in weight.parts.items()}
            return self._linear(weight, tensors)
        cut = weight.part.cut
        slices = [(values, StoredSlice.covering(weight, values)) for values in cut.ranges]
        if weight.part.cuts_inputs:
            [(values, stored)] = slices
            inputs = range(values.start - stored.start, values.stop - stored.start)
            return self._slice(stored).of_inputs(inputs, weight.layout.inputs_per_scale)
        parts = []
        for values, stored in slices:
            part = self._slice(stored)
            num_copies = len(part.numbers) // (stored.stop - stored.start)
            first = (values.start - stored.start) * num_copies
            parts.append(part.of_outputs(range(first, first + len(values) * num_copies)))
        return concatenate(parts).with_zeros(cut.num_zeros)

    def largest(self, name: str) -> Tensor:
        """Return the largest magnitude of each row of a weight whose inputs are cut, over the inputs of all ranks.

        The result has the shape of the dense weight, without the inputs, and the reader's dtype.
        """
        cut, weight = self._weights.cut_of(name), self._weights.quantized.get(name)
        assert cut is not None
        whole = self._read(self._weights.plain[name]) if weight is None else self._read_whole(weight)
        return whole.to(self._dtype).abs().amax(cut.dim)

    def _slice(self, stored: StoredSlice) -> QuantizedLinear:
        tensors = {}
        for suffix, tensor in stored.weight.parts.items():
            found = stored.range_of(suffix)
            tensors[suffix] = self._read(tensor)
            if found is not None:
                dim, entries = found
                tensors[suffix] = tensors[suffix].narrow(dim, entries.start, len(entries)).contiguous()
        return self._linear(replace(stored.weight, layout=stored.layout), tensors)

    def _linear(self, weight: QuantizedWeight, tensors: Mapping[str, Tensor]) -> QuantizedLinear:
        assert self._weights.quantization is not None
        return read_quantized(weight, tensors, self._weights.quantization)

    def _read_weight(self, name: str) -> Tensor:
        if name in self._weights.quantized:
            return self._read_dense(self._weights.quantized[name])
        tensor, cut = self._read(self._weights.plain[name]), self._weights.cuts.get(name)
        return tensor if cut is None else cut_tensor(tensor, cut)

    def _read_dense(self, weight: QuantizedWeight) -> Tensor:
        if weight.part is not None and not is_cut_when_stored(weight):
            return cut_tensor(self._read_whole(weight), weight.part.cut)
        return shape_dense(weight, self.quantized(weight).dense(self._dtype))

    def _read_whole(self, weight: QuantizedWeight) -> Tensor:
        """Return a whole dense weight, of which a rank holds a part."""
        assert weight.part is not None
        return self._read_dense(replace(weight, layout=weight.part.whole, part=None))

    def _read(self, tensor: StoredTensor) -> Tensor:
        with self._lock:
            if tensor.file not in self._opened:
                self._opened[tensor.file] = safe_open(tensor.file, framework="pt")
        view: Tensor = self._opened[tensor.file].get_tensor(tensor.name)
        return view.data  # A view refers to the mapped file, even after its numbers have been moved.


def cut_tensor(tensor: Tensor, cut: Cut) -> Tensor:
    """Return a copy of the slices of `tensor`. Of a mapped file, only they are read."""
    parts = [tensor.narrow(cut.dim, part.start, len(part)) for part in cut.ranges]
    if cut.num_zeros:
        zeros = (*tensor.shape[: cut.dim], cut.num_zeros, *tensor.shape[cut.dim + 1 :])
        parts.append(torch.zeros(zeros, dtype=tensor.dtype))
    return torch.cat(parts, cut.dim)
