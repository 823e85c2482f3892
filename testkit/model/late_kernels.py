"""Triton's kernels on a recorded GPU: they run late, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from testkit.model.recorded_gpu import DeviceTensor


class LateKernel:
    """Kernel whose launch is recorded with the memory that it uses; on tensors of the host it runs at once."""

    def __init__(self, kernel: Any, outputs: tuple[str, ...]) -> None:
        """`outputs` are the kernel's arguments that it writes; it may also read them."""
        self._kernel = kernel
        self._names: list[str] = kernel.arg_names
        self._outputs = outputs
        assert set(outputs) <= set(self._names), f"{kernel.__name__} has no such arguments"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        tensors = {
            name: argument
            for name, argument in zip(self._names, arguments, strict=False)
            if isinstance(argument, DeviceTensor)
        }
        memories = [argument.memory if isinstance(argument, DeviceTensor) else argument for argument in arguments]
        run = partial(self._kernel[grid], *memories, **constants)
        if not tensors:
            run()
            return
        next(iter(tensors.values())).gpu.launch(
            self._kernel.__name__,
            run,
            [tensor.memory for tensor in tensors.values()],
            [tensor.memory for name, tensor in tensors.items() if name in self._outputs],
        )


def run_late(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **outputs: tuple[str, ...]) -> None:
    """Let the kernels of a module that `outputs` names run late; each has the arguments that it writes."""
    for name, written in outputs.items():
        monkeypatch.setattr(module, name, LateKernel(getattr(module, name), written))
