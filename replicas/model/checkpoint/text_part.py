"""Text part of checkpoints of text and images: its decoder's type and its weights. The module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from replicas.model.checkpoint.headers import StoredTensor

WRAPPERS: Mapping[str, str | None] = {
    **dict.fromkeys((
        "aya_vision", "cohere2_vision", "exaone4_5", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "idefics3",
        "internvl", "lfm2_vl", "llava", "llava_next", "llava_onevision", "mistral3", "qwen3_5", "qwen3_5_moe",
        "smolvlm",
    )),
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}  # fmt: skip
"""Types of checkpoints whose text part is served alone, each with the type of its decoder.

None: the decoder is that of the `text_config`. The others have positions in three dimensions, which are equal for text.
"""

_DECODERS = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
"""Prefixes of the decoder's weights. The first that a checkpoint has is that of its decoder."""
_OUTPUT_LAYERS = ("lm_head.", "language_model.lm_head.")


def text_tensors(tensors: Mapping[str, StoredTensor], model_type: str | None) -> dict[str, StoredTensor]:
    """Return the tensors of the decoder by their names in a model of text alone; those of other parts are left out.

    The tensors of a checkpoint that is no wrapper are returned as they are.
    """
    if model_type not in WRAPPERS:
        return dict(tensors)
    decoder = next((prefix for prefix in _DECODERS if any(name.startswith(prefix) for name in tensors)), "model.")
    names = {decoder: "model.", **dict.fromkeys(_OUTPUT_LAYERS, "lm_head.")}
    return {
        text_prefix + name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        for prefix, text_prefix in names.items()
        if name.startswith(prefix)
    }
