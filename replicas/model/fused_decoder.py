"""The decoder of the Llama family in few large operations, in the place of transformers' own."""

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

from replicas.model.attention import AttentionCall, AttentionPort, Scoring
from replicas.model.kv_cache import AttentionLayer
from replicas.model.layer_math import HeadLayout, LayerMath, Norm, Rotation
from replicas.model.linears import LinearFactory, join_linears

_FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


class FusedLayer(nn.Module):
    """One decoder layer: query, key and value come out of one multiplication, gate and up projection of another."""

    def __init__(self, layer: Any, facts: AttentionLayer, make: LinearFactory) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.query_key_value = join_linears((attention.q_proj, attention.k_proj, attention.v_proj), make)
        self.output = make(attention.o_proj.weight, attention.o_proj.bias)
        self.gate_up = join_linears((mlp.gate_proj, mlp.up_proj), make)
        self.down = make(mlp.down_proj.weight, mlp.down_proj.bias)
        self.input_norm = _norm(layer.input_layernorm)
        self.post_attention_norm = _norm(layer.post_attention_layernorm)
        self.heads = HeadLayout(
            num_query_heads=facts.num_query_heads,
            num_kv_heads=facts.num_kv_heads,
            size=facts.key_size,
            query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        )
        self.facts = facts
        self.scoring = Scoring(float(attention.scaling))

    def attend(self, hidden: Tensor, rotation: Rotation, math: LayerMath, port: AttentionPort) -> Tensor:
        """What attention adds to the residual stream, [num_tokens, hidden_size]."""
        rows = self.query_key_value(hidden)
        math.rotate(rows, self.heads, rotation)
        query, key, value = rows.view(len(rows), -1, self.heads.size).split(
            (self.heads.num_query_heads, self.heads.num_kv_heads, self.heads.num_kv_heads), dim=1
        )
        call = AttentionCall(self.facts.index, query, key, value, self.scoring, self.facts.window, extras=frozenset())
        output: Tensor = self.output(port.attend(call).flatten(1))
        return output

    def transform(self, hidden: Tensor, math: LayerMath) -> Tensor:
        """What the feed-forward part adds to the residual stream, [num_tokens, hidden_size]."""
        output: Tensor = self.down(math.gate(self.gate_up(hidden)))
        return output


class FusedDecoder(nn.Module):
    """Computes what the decoder `original` computes for a flat batch, and takes its layers apart to get there.

    At no time are all weights held twice.
    """

    def __init__(
        self,
        original: Any,
        port: AttentionPort,
        layers: Sequence[AttentionLayer],
        math: LayerMath,
        make: LinearFactory,
    ) -> None:
        super().__init__()
        self.embed_tokens = original.embed_tokens
        self.rotary_emb = original.rotary_emb
        self._layers: list[FusedLayer] = []
        for facts in layers:
            self._layers.append(FusedLayer(original.layers[facts.index], facts, make))
            original.layers[facts.index] = nn.Identity()
        self.layers = nn.ModuleList(self._layers)
        self._final_norm = _norm(original.norm)
        self._port = port
        self._math = math

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: object) -> BaseModelOutputWithPast:
        """Hidden states [1, num_tokens, hidden_size]; both arguments are [1, num_tokens] int64."""
        residual = self.embed_tokens(input_ids[0])
        cos, sin = self.rotary_emb(residual, position_ids)
        update = self._run_layers(residual, Rotation(cos[0], sin[0]))
        hidden = self._math.add_and_normalize(residual, update, self._final_norm)
        return BaseModelOutputWithPast(last_hidden_state=hidden[None])

    def _run_layers(self, residual: Tensor, rotation: Rotation) -> Tensor | None:
        """Add what the layers give to `residual`, except for the last feed-forward part: that is returned."""
        update = None
        for layer in self._layers:
            hidden = self._math.add_and_normalize(residual, update, layer.input_norm)
            update = layer.attend(hidden, rotation, self._math, self._port)
            hidden = self._math.add_and_normalize(residual, update, layer.post_attention_norm)
            update = layer.transform(hidden, self._math)
        return update


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` computes what the decoder of `model` computes."""
    # Exactly these: a subclass may compute something else.
    return type(model) in _FAMILY and model.config.hidden_act == "silu"


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), float(module.variance_epsilon))
