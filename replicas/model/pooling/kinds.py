"""Kinds of models by their config: encoders, decoders that are two-sided, and heads. It imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
