"""Check of a loaded model whose tokens must not depend on the other sequences of a step."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from replicas.errors import ModelLoadError
from replicas.model.attention.cpp import can_attend
from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.kv_cache import AttentionLayer
from replicas.model.attention.probe import dry_forward

_log = logging.getLogger(__name__)

_PRODUCTS = frozenset(("linear", "mm", "addmm", "bmm", "baddbmm", "mv", "_grouped_mm", "_linear_pointwise"))
"""Products of torch, and of oneDNN through it."""


class _TorchProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that notes torch's products of 16-bit numbers, whose order of sums may depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _PRODUCTS and args[0].itemsize == 2:
            self.found.add(name)
        with self:  # A composite operation is made of others.
            decomposed = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if decomposed is NotImplemented else decomposed


def _refuse_torch_sums(
    model: PreTrainedModel, port: AttentionPort, layers: tuple[AttentionLayer, ...], has_kernels: bool
) -> None:
    """Raise ModelLoadError if torch adds up 16-bit numbers in the model on a CPU, and not the compiled kernels."""
    needed = f"batch_invariant is true; in {model.dtype} on a CPU that needs the compiled kernels"
    if not has_kernels:
        raise ModelLoadError(needed)
    if not can_attend(layers):
        raise ModelLoadError(f"{needed}, which do not support the sizes of the model's heads")
    with _TorchProducts() as products:
        dry_forward(model, port, [3, 4, 5, 6])
    if products.found:
        raise ModelLoadError(f"{needed}, and the model also uses torch's {', '.join(sorted(products.found))}")


def check_batch_invariance(
    model: PreTrainedModel, port: AttentionPort, layers: tuple[AttentionLayer, ...], has_kernels: bool
) -> bool:
    """Return True if the model must compute with `BatchInvariantOps`; False on a CPU, where it need not.

    Raises:
        ModelLoadError: the kernels that it needs do not work here, or do not support the model.
        UnsupportedModel: its code has an operation without a batch-invariant kernel.
    """
    device, dtype = model.device, model.dtype
    if device.type == "cpu":
        if dtype != torch.float32:
            _refuse_torch_sums(model, port, layers, has_kernels)
        _log.info("batch_invariant changes nothing on a CPU: no sequence's tokens depend on others there")
        return False
    try:
        from replicas.model.layers.batch_invariant import check_products, refuse_others
    except ImportError as error:
        raise ModelLoadError(f"batch_invariant is true, which needs Triton: {error}") from error
    fault = check_products(dtype, device)
    if fault is not None:
        raise ModelLoadError(f"batch_invariant is true, and its kernels do not work here: {fault}")
    refuse_others(model.config.model_type, lambda: dry_forward(model, port, [3, 4, 5, 6]))
    return True
