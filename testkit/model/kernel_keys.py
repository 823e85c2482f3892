"""Keys by which Triton tells compiled kernels apart, noted in place of the launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

Key = tuple[object, ...]


def _specialization(value: Any) -> object:
    """Return what a kernel is compiled for: the type and alignment of an argument, and whether an integer is 1."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "one" if value == 1 else ("int", value % 16 == 0, value < 2**31)
    return type(value)


class NotedKernel:
    """Kernel that notes the key of each launch, and computes nothing."""

    def __init__(self, kernel: Any, keys: set[Key]) -> None:
        self._kernel = kernel
        self._keys = keys

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._note, grid)

    def _note(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        assert all(size >= 0 for size in grid)
        parameters = self._kernel.params
        parts = [
            (parameter.name, None if parameter.do_not_specialize else _specialization(argument))
            for parameter, argument in zip(parameters, arguments, strict=False)
        ]
        self._keys.add((self._kernel.__name__, *parts, *sorted(constants.items())))


def note_launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> set[Key]:
    """Return the set that receives the keys of all kernels that `module` launches."""
    keys: set[Key] = set()
    for name, kernel in list(vars(module).items()):
        if name.endswith("_kernel"):
            monkeypatch.setattr(module, name, NotedKernel(kernel, keys))
    return keys
