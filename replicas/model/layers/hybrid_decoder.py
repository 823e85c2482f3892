"""Decoder of gated delta nets and gated attention that runs all its layers in one call of the compiled C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.state_cpp import CppStates
from replicas.model.layers.gated_delta_net import GatedDeltaNet
from replicas.model.layers.linear import CompiledLinear

_CLASS = "Qwen3_5ForCausalLM"


class HybridDecoder(nn.Module):
    """Replacement of the decoder `original`, whose modules it keeps.

    A step whose attention or states are not in the compiled kernels runs in the original. So does a decoder with linear
    layers that are not compiled.
    """

    def __init__(self, original: Any, port: AttentionPort) -> None:
        super().__init__()
        self.original = original
        self._port = port

    def forward(self, input_ids: Tensor, position_ids: Tensor, **others: object) -> BaseModelOutputWithPast:
        """Return hidden states [1, num_tokens, hidden_size]; both arguments are [1, num_tokens] int64."""
        attention, states, stack = self._port.context, self._port.recurrent.context, self._stack
        if stack is None or not isinstance(attention, CppAttention) or not isinstance(states, CppStates):
            output: BaseModelOutputWithPast = self.original(input_ids=input_ids, position_ids=position_ids, **others)
            return output
        residual = self.embed_tokens(input_ids[0])
        cos, sin = self.original.rotary_emb(residual, position_ids[None])
        caches = [attention.cache[index] for index in stack.attention_layers]
        slots = [states.cache[index] for index in stack.recurrent_layers]
        update = torch.ops.headway.run_hybrid_layers.default(
            residual,
            cos[0],
            sin[0],
            stack.parts,
            stack.is_recurrent,
            stack.num_query_heads,
            stack.epsilon,
            stack.scale,
            [cache.keys for cache in caches],
            [cache.values for cache in caches],
            [cache.key_scales for cache in caches if cache.key_scales is not None],
            [cache.value_scales for cache in caches if cache.value_scales is not None],
            [slot.inputs for slot in slots],
            [slot.states for slot in slots],
            [slot.keys for slot in slots],
            [slot.updates for slot in slots],
            [slot.decays for slot in slots],
            attention.slots,
            attention.chunks,
            attention.tables,
            *states.plan,
        )
        hidden = torch.ops.headway.add_and_normalize.default(residual, update, stack.final_norm, stack.epsilon)
        return BaseModelOutputWithPast(last_hidden_state=hidden[None])

    @property
    def embed_tokens(self) -> nn.Module:
        """Embedding of tokens, by which transformers finds a decoder's output layer, too."""
        embedding: nn.Module = self.original.embed_tokens
        return embedding

    @cached_property
    def _stack(self) -> _Stack | None:
        return _stack(self.original)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Arguments of the kernel call that are constant for all steps."""

    parts: list[Tensor | None]
    """Tensors of each layer, in the order in which `HybridLayers` in hybrid_decoder.h reads them."""
    is_recurrent: list[int]
    """1 for each layer of the gated delta rule, 0 for each of attention."""
    num_query_heads: int
    scale: float
    epsilon: float
    final_norm: Tensor

    @property
    def recurrent_layers(self) -> list[int]:
        """Indices of the layers of the gated delta rule."""
        return [index for index, flag in enumerate(self.is_recurrent) if flag]

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the layers of attention."""
        return [index for index, flag in enumerate(self.is_recurrent) if not flag]


def replace_hybrid_decoder(model: PreTrainedModel, port: AttentionPort) -> None:
    """Replace the decoder of `model` if it is one that `HybridDecoder` computes."""
    # The exact type, by its name: not every version of transformers has it.
    if type(model).__name__ == _CLASS and model.config.hidden_act == "silu":
        model.model = HybridDecoder(model.model, port)


def _stack(decoder: Any) -> _Stack | None:
    """Return the constant arguments; None if a layer is not compiled."""
    parts: list[Tensor | None] = []
    attention: Any = None
    flags: list[int] = []
    for layer in decoder.layers:
        flags.append(int(hasattr(layer, "linear_attn")))
        parts.append(_weight(layer.input_layernorm))
        if flags[-1]:
            mixer = layer.linear_attn
            if not isinstance(mixer, GatedDeltaNet):
                return None
            delta = mixer.parts
            tensors: Sequence[Tensor] = (delta.conv_weight, delta.rates, delta.biases, delta.norm)
            mixing = [mixer.inputs, *tensors, mixer.output]
        else:
            attention = layer.self_attn
            norms = (_weight(attention.q_norm), _weight(attention.k_norm))
            mixing = [attention.q_proj, attention.k_proj, attention.v_proj, *norms, attention.o_proj]
        mlp = layer.mlp
        feed_forward = [_weight(layer.post_attention_layernorm), mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        for part in (*mixing, *feed_forward):
            if isinstance(part, CompiledLinear):
                parts += part.parts()
            elif isinstance(part, Tensor):
                parts.append(part)
            else:
                return None
    if attention is None:
        return None
    return _Stack(
        parts,
        flags,
        attention.config.num_attention_heads,
        float(attention.scaling),
        float(decoder.config.rms_norm_eps),
        _weight(decoder.norm),
    )


def _weight(norm: Any) -> Tensor:
    """Return the factors of a norm whose weight is centred at 0, in float32."""
    weight: Tensor = 1.0 + norm.weight.detach().float()
    return weight
