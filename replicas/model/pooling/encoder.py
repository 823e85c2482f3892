"""Encoders in the place of decoders: models whose attention is two-sided, and that generate no tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

_WITHOUT_OUTPUT = ("Model", "ForSequenceClassification")
"""Ends of the names of classes without an output layer."""
ENCODERS = ("bert", "camembert", "modernbert", "nomic_bert", "roberta", "xlm-roberta")
"""Types of the encoders that are served."""
_BEHIND_PADDING = ("camembert", "roberta", "xlm-roberta")
"""Types that count positions from the one behind their padding token's id."""


def is_encoder(config: PretrainedConfig) -> bool:
    """Return True for an encoder."""
    return config.model_type in ENCODERS


def is_two_sided(config: PretrainedConfig) -> bool:
    """Return True if a token sees the tokens behind it: in an encoder, and in decoders that were trained so."""
    is_decoder = not is_encoder(config) and has_output_layer(config)
    return not is_decoder and (is_encoder(config) or bool(getattr(config, "use_bidirectional_attention", False)))


def has_output_layer(config: PretrainedConfig) -> bool:
    """Return True if a checkpoint generates tokens: its class is no encoder, not a decoder alone, and no classifier."""
    names = () if is_encoder(config) else config.architectures or ("",)
    return any(not name.endswith(_WITHOUT_OUTPUT) or name.endswith("LMHeadModel") for name in names)


def is_classifier(config: PretrainedConfig) -> bool:
    """Return True if a checkpoint has a head that scores texts."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def tells_pairs_apart(config: PretrainedConfig) -> bool:
    """Return True for an encoder that scores pairs, and gives the tokens of the second text another type."""
    return is_encoder(config) and is_classifier(config) and getattr(config, "type_vocab_size", 1) > 1


def first_position(config: PretrainedConfig) -> int:
    """Return the position of a text's first token."""
    return int(config.pad_token_id) + 1 if config.model_type in _BEHIND_PADDING else 0


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
        self._output = _NoOutput(config.vocab_size)
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


class _NoOutput(nn.Module):
    """Output layer of a model that generates no tokens: zeros."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """Return zeros [1, num_rows, vocab_size]."""
        return hidden.new_zeros(*hidden.shape[:2], self._vocab_size)
