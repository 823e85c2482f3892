"""Latent attention: a layer stores one latent key for each token, instead of the keys and values of all heads.

In such layers a token's keys and values are linear in its latent vector c: a head's key is (W c, r) with a rotary part
r that all heads share, and its value is V c. Since q (W c) = (q W) c, and a weighted sum of V c is V times the sum of
c, all heads can attend with queries (q W, rotary query) to the one key (c, r) and the value c. DeepSeek-AI,
DeepSeek-V2, 2024, section 2.1.

transformers expands c in a method `expand_kv`, by the layer `kv_b_proj`. Both are replaced here. The rest of the
layer's code stays, so forms of rotary encodings and norms make no difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.model.attention.gather import attend_dense
from replicas.model.attention.interface import LATENT_ATTRIBUTE, AttentionCall, AttentionPort
from replicas.model.hardware.selfcheck import find_fault, relative_error
from replicas.model.layers.linear import can_multiply, pack

_log = logging.getLogger(__name__)

_EXPAND = "expand_kv"
_TRIAL_TOKENS = (3, 4, 5, 6, 7)

HeadLinearFactory = Callable[[Tensor], nn.Module]
"""Factory of the linear layers of all heads from their weights [num_heads, in_size, out_size]."""


class HeadLinear(nn.Module):
    """Linear layer of each head, without a bias."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [num_heads, num_tokens, in_size] and return [num_heads, num_tokens, out_size]."""
        # Without AVX-512, torch's product in bfloat16 fails with a parameter.
        return torch.bmm(inputs, self.weight.data)


class CppHeadLinear(nn.Module):
    """`HeadLinear` in the compiled kernel. A row's outputs do not depend on the other rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_size = weight.shape[2]
        packed = torch.stack([pack(head.t()) for head in weight])
        self.packed = nn.Parameter(packed, requires_grad=False)  # [num_heads, ...], each in the order of `pack`

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [num_heads, num_tokens, in_size] and return [num_heads, num_tokens, out_size]."""
        output: Tensor = torch.ops.headway.multiply_heads.default(inputs.contiguous(), self.packed, self.out_size)
        return output


class LatentAttention(nn.Module):
    """Products of a layer's heads with latents; `LatentHeads` of one attention module of transformers."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.own_size: int = attention.qk_nope_head_dim
        weight: Tensor = attention.kv_b_proj.weight  # [num_heads * (own_size + value_size), latent size]
        heads = weight.detach().view(-1, self.own_size + attention.v_head_dim, weight.shape[1])
        self.query: nn.Module = HeadLinear(heads[:, : self.own_size].contiguous())
        self.values: nn.Module = HeadLinear(heads[:, self.own_size :].transpose(1, 2).contiguous())

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries [1, num_heads, num_tokens, latent size + rotary size] for a layer's own queries."""
        latent = self.query(query[0, ..., : self.own_size])
        return torch.cat((latent, query[0, ..., self.own_size :]), dim=-1)[None]

    def expand(self, output: Tensor) -> Tensor:
        """Return [num_tokens, num_heads, value_size] for sums of latents [num_tokens, num_heads, latent size]."""
        expanded: Tensor = self.values(output.transpose(0, 1))
        return expanded.transpose(0, 1)


def latent_key(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value [1, 1, num_tokens, size] of all heads, in the place of `expand_kv`."""
    key = torch.cat((latent, rotary), dim=-1)
    return key, key[..., : latent.shape[-1]]


def store_latents(model: nn.Module) -> None:
    """Make all layers with latent attention store latents, without a check."""
    for attention in _latent_modules(model):
        _replace(attention)


def store_checked_latents(model: PreTrainedModel, port: AttentionPort) -> bool:
    """Make each layer store latents for which a check shows that it computes the same; return True if one does.

    The check runs the model on a few tokens. Other layers store the keys and values of all heads, with a warning.
    """
    modules = _latent_modules(model)
    faults: list[str] = []
    hooks = [attention.register_forward_hook(_Check(faults), with_kwargs=True) for attention in modules]
    if modules:
        token_ids = torch.tensor([_TRIAL_TOKENS], device=model.device) % model.config.vocab_size
        positions = torch.arange(len(_TRIAL_TOKENS), device=model.device)[None]
        with torch.inference_mode(), port.using(_DenseAttention()):
            model(input_ids=token_ids, position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    if faults:
        _log.warning(
            "%d of %d layers store keys and values of all heads, which takes much memory: %s",
            len(faults),
            len(modules),
            faults[0],
        )
    return len(faults) < len(modules)


def replace_head_linears(model: nn.Module, make: HeadLinearFactory) -> None:
    """Replace the linear layers of latent attention's heads, where the kernels support them."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, HeadLinear) and can_multiply(child.weight[0].t().shape):
                setattr(parent, name, make(child.weight))


class _DenseAttention:
    """Attention over the tokens of a call alone, which are one sequence."""

    def attend(self, call: AttentionCall) -> Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in (call.query, call.key, call.value))
        return attend_dense(query, key, value, None, call.scoring)[0].transpose(0, 1)


class _Check:
    """Forward hook of an attention module: makes it store latents, and undoes that if its output is another."""

    def __init__(self, faults: list[str]) -> None:
        self._faults = faults

    def __call__(self, attention: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        kv_b_proj, expected = attention.kv_b_proj, output[0]

        def errors() -> Iterator[tuple[str, float]]:
            _replace(attention)
            yield f"layer {attention.layer_idx}", relative_error(attention.forward(*args, **kwargs)[0], expected)

        fault = find_fault(errors(), expected.dtype)
        if fault is not None:
            self._faults.append(fault)
            attention.kv_b_proj = kv_b_proj
            for name in (_EXPAND, LATENT_ATTRIBUTE):
                if name in vars(attention) | attention._modules:
                    delattr(attention, name)


def _latent_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, _EXPAND)]


def _replace(attention: Any) -> None:
    latent = LatentAttention(attention)
    setattr(attention, LATENT_ATTRIBUTE, latent)
    setattr(attention, _EXPAND, latent_key)
    attention.kv_b_proj = nn.Identity()
