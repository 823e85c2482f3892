"""Model that is ready to run, with its constants."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from replicas.model.attention.interface import AttentionContext, AttentionPort, AttentionSpec
from replicas.model.attention.kv_cache import AttentionLayer, LayerGroup, is_quantized
from replicas.model.attention.layer_groups import group_layers
from replicas.model.attention.recurrent import StateContext
from replicas.model.attention.state_cache import StateLayer
from replicas.model.attention.state_select import StateSpec
from replicas.model.hardware.selfcheck import Agree, alone
from replicas.model.parallel.cut_logits import CutLogits
from replicas.model.parallel.rank_group import RankGroup
from replicas.model.pooling.heads import PoolHead
from replicas.model.pooling.tap import HiddenTap


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model that is ready to run, and its constants."""

    model_id: str
    model: PreTrainedModel
    port: AttentionPort
    """Connection of the model's attention layers to the context of each forward pass."""
    hidden: HiddenTap
    """Tap of the hidden states that are pooled."""
    layers: tuple[AttentionLayer, ...]
    """Attention shapes of the layers with a KV cache, in order of index."""
    tokenizer: PreTrainedTokenizerFast | None
    """Tokenizer; None if the model's directory has no tokenizer files."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    has_kernels: bool = False
    """True if the compiled CPU kernels are loaded and support `dtype`."""
    weights: str = ""
    """Format of the weights in the checkpoint and in memory, for people; empty: not known."""
    is_batch_invariant: bool = False
    """True if the model computes with `BatchInvariantOps`, which need Triton."""
    notes: tuple[str, ...] = ()
    """Faults of the checkpoint with which it is served all the same, a sentence each."""
    head: PoolHead | None = None
    """Head of pooled outputs; None: the model has no pooling."""
    generates: bool = True
    """True if the model generates tokens."""
    two_sided_layers: tuple[AttentionLayer, ...] = ()
    """Attention shapes of the layers whose tokens see those behind them. They have no KV cache."""
    ranks: RankGroup | None = None
    """Ranks that have the other parts of the model; None: the model is whole."""

    @property
    def agree(self) -> Agree:
        """Agreement of the ranks that compute the model."""
        return alone if self.ranks is None else self.ranks.all_true

    @property
    def cut_logits(self) -> CutLogits | None:
        """Join of the logits of several ranks; None: `logits` returns those of all tokens."""
        return None if self.ranks is None else CutLogits(self.ranks, self.vocab_size)

    def ops(self) -> AbstractContextManager[object]:
        """Return the context in which the model's operations are those that it was loaded for."""
        if not self.is_batch_invariant:
            return nullcontext()
        from replicas.model.layers.batch_invariant import BatchInvariantOps  # Only torch for CUDA installs Triton.

        return BatchInvariantOps()  # type: ignore[no-untyped-call]

    @property
    def is_two_sided(self) -> bool:
        """True if a token sees the tokens behind it, so that a text is computed whole, without a KV cache."""
        return bool(self.two_sided_layers)

    @property
    def state_layers(self) -> tuple[StateLayer, ...]:
        """Shapes of the recurrent layers' states, in order of index; empty: the model has none."""
        return self.port.recurrent.layers

    def logits(
        self,
        context: AttentionContext,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Tensor | int,
        states: StateContext | None = None,
    ) -> Tensor:
        """Run a forward pass with attention by `context` and return logits [num_rows, vocab_size] in `dtype`.

        Of several ranks each returns the logits of its part of the tokens. `states` are those of recurrent layers.

        Ids and positions are [1, num_tokens] int64. `rows` [num_rows] int64 are the tokens whose logits are returned;
        0 means all.
        """
        with self.port.using(context, states), self.ops():
            output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows)
        logits: Tensor = output.logits[0]
        return logits

    def layer_groups(self, cache_dtype: torch.dtype) -> tuple[LayerGroup, ...]:
        """Return the groups of layers, each with block tables of its own, in a KV cache of `cache_dtype`."""
        return group_layers(self.layers, self.max_model_len, cache_dtype)

    def attention_spec(self, block_size: int, cache_dtype: torch.dtype | None = None) -> AttentionSpec:
        """Return the model's requirements on attention over blocks of `block_size` tokens.

        `cache_dtype` is the number format of the KV cache; None: the model's.
        """
        quantized = cache_dtype if cache_dtype is not None and is_quantized(cache_dtype) else None
        return AttentionSpec(
            self.layers,
            block_size,
            self.max_model_len,
            self.dtype,
            self.device,
            self.has_kernels,
            quantized,
            self.is_batch_invariant,
        )

    def state_spec(self, block_size: int) -> StateSpec:
        """Return the model's requirements on recurrent state with boundaries every `block_size` tokens."""
        return StateSpec(
            self.state_layers, block_size, self.dtype, self.device, self.is_batch_invariant, self.has_kernels
        )
