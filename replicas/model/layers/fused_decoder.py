"""Fused decoder: replaces transformers' decoders of the Llama family by one of fewer, larger operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from replicas.model.attention.interface import AttentionCall, AttentionPort, Scoring
from replicas.model.attention.kv_cache import AttentionLayer
from replicas.model.layers.float8_linear import Float8Linear
from replicas.model.layers.linear import LinearFactory, join_linears
from replicas.model.layers.ops import HeadLayout, LayerOps, Norm, RotaryCosSin

_FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


class FusedLayer(nn.Module):
    """Decoder layer with one multiplication for query, key and value, and one for the gate and up projections."""

    def __init__(self, layer: Any, spec: AttentionLayer, make: LinearFactory) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.query_key_value = join_linears((attention.q_proj, attention.k_proj, attention.v_proj), make)
        self.output = join_linears((attention.o_proj,), make)
        self.gate_up = join_linears((mlp.gate_proj, mlp.up_proj), make)
        self.down = join_linears((mlp.down_proj,), make)
        self.input_norm = _norm(layer.input_layernorm)
        self.post_attention_norm = _norm(layer.post_attention_layernorm)
        self.heads = HeadLayout(
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.num_kv_heads,
            size=spec.key_size,
            query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        )
        self.spec = spec
        self.scoring = Scoring(float(attention.scaling))

    def attend(self, rows: Tensor, cos_sin: RotaryCosSin, ops: LayerOps, port: AttentionPort) -> Tensor:
        """Compute attention of `rows`, in which `heads` are; return its update of the residual stream.

        The update is [num_tokens, hidden_size]. `rows` are changed.
        """
        ops.rotary_embedding(rows, self.heads, cos_sin)
        query, key, value = rows.view(len(rows), -1, self.heads.size).split_with_sizes(
            (self.heads.num_query_heads, self.heads.num_kv_heads, self.heads.num_kv_heads), dim=1
        )
        call = AttentionCall(self.spec.index, query, key, value, self.scoring, self.spec.window, extras=frozenset())
        output: Tensor = self.output(port.attend(call).flatten(1))
        return output

    def transform(self, rows: Tensor, ops: LayerOps) -> Tensor:
        """Gate `rows` of gate and up projections; return their update of the residual stream, as `attend` does."""
        output: Tensor = self.down(ops.silu_and_mul(rows))
        return output


class FusedDecoder(nn.Module):
    """Replacement of the decoder `original` for flat batches. Its construction removes the layers of `original`.

    The layers are replaced one by one, so at most one layer's weights are held twice.
    """

    def __init__(
        self,
        original: Any,
        port: AttentionPort,
        layers: Sequence[AttentionLayer],
        ops: LayerOps,
        make: LinearFactory,
    ) -> None:
        super().__init__()
        self.embed_tokens = original.embed_tokens
        self.rotary_emb = original.rotary_emb
        self._layers: list[FusedLayer] = []
        for spec in layers:
            self._layers.append(FusedLayer(original.layers[spec.index], spec, make))
            original.layers[spec.index] = nn.Identity()
        self.layers = nn.ModuleList(self._layers)
        self._final_norm = _norm(original.norm)
        self._port = port
        self._ops = ops

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: object) -> BaseModelOutputWithPast:
        """Return hidden states [1, num_tokens, hidden_size]; both arguments are [1, num_tokens] int64."""
        residual = self.embed_tokens(input_ids[0])
        cos, sin = self.rotary_emb(residual, position_ids)
        update = self._run_layers(residual, RotaryCosSin(cos[0], sin[0]))
        hidden = self._ops.add_and_normalize(residual, update, self._final_norm)
        return BaseModelOutputWithPast(last_hidden_state=hidden[None])

    def _run_layers(self, residual: Tensor, cos_sin: RotaryCosSin) -> Tensor | None:
        """Run the layers. Add their updates to `residual`, except the last feed-forward update, which is returned."""
        update = None
        for layer in self._layers:
            rows = self._project(residual, update, layer.input_norm, layer.query_key_value)
            update = layer.attend(rows, cos_sin, self._ops, self._port)
            rows = self._project(residual, update, layer.post_attention_norm, layer.gate_up)
            update = layer.transform(rows, self._ops)
        return update

    def _project(self, residual: Tensor, update: Tensor | None, norm: Norm, linear: nn.Module) -> Tensor:
        """Add `update` to `residual` in place, and return the normalised sum times the layer's weight."""
        if isinstance(linear, Float8Linear):
            return linear.multiply_rounded(*self._ops.add_normalize_and_round(residual, update, norm))
        output: Tensor = linear(self._ops.add_and_normalize(residual, update, norm))
        return output


def can_fuse(model: PreTrainedModel) -> bool:
    """Return True if `FusedDecoder` computes the same as the decoder of `model`."""
    # Exact types: a subclass may compute something else.
    return type(model) in _FAMILY and model.config.hidden_act == "silu"


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach().clone(), float(module.variance_epsilon))
