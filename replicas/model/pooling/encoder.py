"""Encoders in the place of decoders: models whose attention is two-sided, and that generate no tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from replicas.model.pooling.kinds import first_position


class TextEncoder(nn.Module):
    """Encoder with the interface of a decoder, whose output layer gives zeros: it has hidden states alone."""

    generation_config = None

    def __init__(self, encoder: PreTrainedModel, config: PretrainedConfig) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = encoder.config
        self._no_split_modules = encoder._no_split_modules
        self._first_position = first_position(config)
        self.pair_separator: int | None = None
        """Token between the texts of a pair, if the model has types of tokens to tell them apart; None: it has not."""
        self._output = NoOutput(config.vocab_size)
        unnumbered = [module for module in encoder.modules() if hasattr(module, "is_causal")]
        for index, module in enumerate(unnumbered):
            if not hasattr(module, "layer_idx"):
                module.layer_idx = index

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device: torch.device = self.encoder.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        dtype: torch.dtype = self.encoder.dtype
        return dtype

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that gets the hidden states."""
        return self._output

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that makes vectors of token ids."""
        layer: nn.Module = self.encoder.get_input_embeddings()
        return layer

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor | int = 0, **_: Any
    ) -> CausalLMOutput:
        """Run the encoder over [1, num_tokens] tokens; only the hidden states of `logits_to_keep` go on."""
        types = {} if self.pair_separator is None else {"token_type_ids": self._types(input_ids, position_ids)}
        hidden = self.encoder(
            input_ids=input_ids, position_ids=position_ids + self._first_position, **types
        ).last_hidden_state
        rows = slice(None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self._output(hidden[:, rows]))

    def _types(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return 0 for the tokens of a pair's first text with its separator, and 1 for those behind it."""
        assert self.pair_separator is not None
        is_separator = input_ids.eq(self.pair_separator).long()
        num_before = is_separator.cumsum(dim=1) - is_separator
        at_start = torch.where(position_ids == 0, num_before, 0).cummax(dim=1).values
        types: Tensor = (num_before - at_start).clamp(max=1)
        return types


class NoOutput(nn.Module):
    """Output layer of a model that generates no tokens: zeros."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """Return zeros [1, num_rows, vocab_size]."""
        return hidden.new_zeros(*hidden.shape[:2], self._vocab_size)
