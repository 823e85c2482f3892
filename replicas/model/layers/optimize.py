"""Optimization of a loaded model: replaces transformers' modules by faster ones that compute the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.model.attention.interface import AttentionPort, number_layers
from replicas.model.attention.kv_cache import AttentionLayer
from replicas.model.attention.probe import dry_forward
from replicas.model.hardware.device import compute_capability
from replicas.model.hardware.selfcheck import WHOLE_MODEL, Agree, agreed_fault, alone, find_fault, relative_error
from replicas.model.layers.cpp_decoder import CppDecoder
from replicas.model.layers.experts import ExpertLinear, replace_experts
from replicas.model.layers.fused_decoder import FusedDecoder, can_fuse
from replicas.model.layers.gated_delta_net import replace_delta_nets
from replicas.model.layers.hybrid_decoder import replace_hybrid_decoder
from replicas.model.layers.latent_attention import CppHeadLinear, HeadLinearFactory, replace_head_linears
from replicas.model.layers.linear import LinearFactory, choose_linears, plain_linear, replace_linears
from replicas.model.layers.ops import CppLayerOps, LayerOps, Norm, TorchLayerOps
from replicas.model.layers.panels import PanelProducts

_log = logging.getLogger(__name__)

# Compilations per function: each kind of layer, for one token and for many. Beyond it torch silently runs uncompiled.
_MAX_COMPILATIONS = 64
_GROUPED_PRODUCTS = (90, 100)
"""Compute capabilities for which torch has a grouped product in bfloat16."""
_TRIALS = ([3, 4, 5, 6, 7], [3])


@dataclass(frozen=True, slots=True)
class FusedModules:
    """Replacements of a model's modules."""

    ops: LayerOps
    make_linear: LinearFactory
    decoder: type[FusedDecoder] = FusedDecoder
    """Decoder class for a model that can be fused."""
    expert_linear: ExpertLinear | None = None
    """Linear layers of experts; None: experts stay as they are."""
    head_linear: HeadLinearFactory | None = None
    """Factory of the linear layers of latent attention's heads; None: they stay as they are."""
    has_recurrent_kernels: bool = False
    """True if the compiled kernels of recurrent layers are loaded."""
    agree: Agree = alone
    """Agreement of the ranks on the kernels that work."""


def cpu_modules(dtype: torch.dtype, has_kernels: bool, quantization: str) -> FusedModules:
    """Return the fastest replacements on CPU. `has_kernels` is True if the compiled kernels are loaded.

    Raises:
        ModelLoadError: there is no such quantization, or it needs the kernels and they are not loaded.
    """
    make_linear = choose_linears(dtype, has_kernels, quantization)
    return (
        FusedModules(CppLayerOps(), make_linear, CppDecoder, head_linear=CppHeadLinear, has_recurrent_kernels=True)
        if has_kernels
        else FusedModules(TorchLayerOps(), make_linear)
    )


def cuda_modules(
    dtype: torch.dtype,
    device: torch.device,
    make_linear: LinearFactory = plain_linear,
    agree: Agree = alone,
    *,
    batch_invariant: bool = False,
) -> FusedModules:
    """Return the fastest replacements on a CUDA device: Triton's kernels if they pass their check, else plain torch.

    They must pass it on all ranks that `agree`.

    If `batch_invariant`, experts multiply in tiles of one size for any number of rows.
    """
    experts = _cuda_expert_linear(dtype, device, batch_invariant=batch_invariant)
    return FusedModules(_cuda_ops(dtype, device, agree), make_linear, expert_linear=experts, agree=agree)


def panel_products(
    dtype: torch.dtype, device: torch.device, agree: Agree = alone, *, batch_invariant: bool = False
) -> PanelProducts | None:
    """Return the products with weights of 4 and 8 bits on a CUDA device; None if a rank finds that they do not work."""
    products: PanelProducts | None = None
    try:
        # Only torch for CUDA installs Triton.
        from replicas.model.layers.triton_panels import TritonPanels, check_panels
    except ImportError as error:
        fault: str | None = str(error)
    else:
        fault = check_panels(dtype, device)
        products = TritonPanels(device, is_batch_invariant=batch_invariant)
    fault = agreed_fault(fault, agree)
    if fault is None:
        return products
    _log.warning("weights of 4 and 8 bits become dense: Triton's kernels for them do not work here: %s", fault)
    return None


def optimize_model(
    model: PreTrainedModel, port: AttentionPort, layers: Sequence[AttentionLayer], modules: FusedModules
) -> None:
    """Replace modules of `model` by `modules`. Results are equal up to rounding and the linear layers' quantization."""
    if can_fuse(model):
        model.model = modules.decoder(model.model, port, layers, modules.ops, modules.make_linear)
    if modules.has_recurrent_kernels:
        fault = replace_delta_nets(model, port.recurrent, modules.make_linear)
        if fault is not None:
            _log.warning("layers of the gated delta rule are slow: the compiled kernels do not work here: %s", fault)
        else:
            replace_hybrid_decoder(model, port)
    replace_norms(model, modules.ops)
    replace_linears(model, modules.make_linear)
    if modules.head_linear is not None:
        replace_head_linears(model, modules.head_linear)
    if modules.expert_linear is not None:
        fault = replace_experts(model, modules.expert_linear, modules.agree)
        if fault is not None:
            _log.warning("experts wait for the device and are slow: Triton's kernel does not work here: %s", fault)


def _cuda_expert_linear(dtype: torch.dtype, device: torch.device, *, batch_invariant: bool) -> ExpertLinear | None:
    """Return the linear layers of experts, where torch's own grouped product would wait for the device."""
    has_grouped_product = device.type == "cuda" and compute_capability(device) in _GROUPED_PRODUCTS
    if has_grouped_product and dtype == torch.bfloat16 and not batch_invariant:
        return None
    try:
        # Only torch for CUDA installs Triton.
        from replicas.model.layers.triton_experts import batch_invariant_expert_linear, expert_linear
    except ImportError:
        return None
    return batch_invariant_expert_linear if batch_invariant else expert_linear


def _cuda_ops(dtype: torch.dtype, device: torch.device, agree: Agree) -> LayerOps:
    ops: LayerOps = TorchLayerOps()
    try:
        # Only torch for CUDA installs Triton.
        from replicas.model.layers.triton_ops import TritonLayerOps, check_layer_ops
    except ImportError as error:
        fault: str | None = str(error)
    else:
        fault = check_layer_ops(dtype, device)
        ops = TritonLayerOps()
    fault = agreed_fault(fault, agree)
    if fault is None:
        return ops
    _log.warning("layers use plain torch and are slow: Triton's kernels do not work here: %s", fault)
    return TorchLayerOps()


class FusedNorm(nn.Module):
    """Root mean square normalisation over the last dimension. If `is_centred`, its factors are 1 + weight."""

    def __init__(self, original: Any, ops: LayerOps, *, is_centred: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter = original.weight
        self.variance_epsilon = float(_epsilon(original))
        weight = self.weight.detach()
        self._norm = Norm(1.0 + weight.float() if is_centred else weight.clone(), self.variance_epsilon)
        self._ops = ops

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `hidden` [..., size]; the result has the same shape."""
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        return self._ops.add_and_normalize(rows, None, self._norm).view(hidden.shape)


def replace_norms(model: nn.Module, ops: LayerOps) -> None:
    """Replace every RMSNorm of `model` that a check shows to compute the same as `FusedNorm`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and _has_plain_fields(child):
                candidates = [FusedNorm(child, ops, is_centred=is_centred) for is_centred in (False, True)]
                is_sound = [find_fault(_norm_errors(child, fused), fused.weight.dtype) is None for fused in candidates]
                setattr(parent, name, next(compress(candidates, is_sound), child))


def _has_plain_fields(norm: nn.Module) -> bool:
    weight = getattr(norm, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and _epsilon(norm) is not None


def _epsilon(norm: nn.Module) -> Any:
    """Return the number that a norm adds to the mean square; None if it has none."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.inference_mode()
def _norm_errors(norm: nn.Module, fused: FusedNorm) -> Iterator[tuple[str, float]]:
    """Yield the error on inputs whose mean is not 0 and whose scale is not 1, which tell norm formulas apart."""
    generator = torch.Generator().manual_seed(0)
    weight = fused.weight
    hidden = (torch.randn(2, 3, len(weight), generator=generator) * 3 + 1).to(weight.device, weight.dtype)
    yield "a norm", relative_error(fused(hidden), norm(hidden))


def compile_layers(model: PreTrainedModel, port: AttentionPort, backend: str = "inductor") -> bool:
    """Compile transformers' decoder layers of `model`, once for each kind of layer. Return True if they are compiled.

    If compilation or the check fails, the layers run uncompiled as before. Attention stays an opaque operation (see
    `attention/interface.py`), so its implementation may differ between steps.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_COMPILATIONS)
    expected = [dry_forward(model, port, token_ids)[1] for token_ids in _TRIALS]
    number_layers(model)
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    fault = find_fault(_compilation_errors(model, port, expected), model.dtype, WHOLE_MODEL)
    if fault is not None:
        for layer in layers:
            layer._compiled_call_impl = None
        _log.warning("layers run uncompiled, because their compilation does not work here: %s", fault)
        return False
    return bool(layers)


def _compilation_errors(
    model: PreTrainedModel, port: AttentionPort, expected: list[Tensor]
) -> Iterator[tuple[str, float]]:
    """Yield the errors of the model's logits. The first run compiles the layers."""
    for token_ids, logits in zip(_TRIALS, expected, strict=True):
        yield "the model with compiled layers", relative_error(dry_forward(model, port, token_ids)[1], logits)
