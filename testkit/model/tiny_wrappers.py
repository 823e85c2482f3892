"""Tiny random checkpoints of text and images, as transformers saves them: with towers, under the names of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from testkit.model.tiny_checkpoints import LAYER_TYPES, SHARED_KV, VOCAB_SIZE

_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_CLIP = {**_VISION, "model_type": "clip_vision_model"}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 32,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.15,
}  # fmt: skip
_SLIDING = {"sliding_window": 24, "layer_types": LAYER_TYPES}
_GEMMA4: dict[str, Any] = {**_TEXT, **_SLIDING, "global_head_dim": 64, "vocab_size_per_layer_input": VOCAB_SIZE}
_GEMMA4_VISION = {**_VISION, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 16}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN2_TEXT = {name: value for name, value in _TEXT.items() if name != "head_dim"}

WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_TEXT, **_SLIDING}, "vision_config": _VISION, "mm_tokens_per_image": 16,
        "tie_word_embeddings": False,
    },
    "gemma4": {"text_config": _GEMMA4, "vision_config": _GEMMA4_VISION, "tie_word_embeddings": False},
    "gemma4-shared": {
        "text_config": {**_GEMMA4, **SHARED_KV, "use_double_wide_mlp": True}, "vision_config": _GEMMA4_VISION,
        "tie_word_embeddings": False,
    },
    "gemma4-experts": {
        "text_config": {
            **_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
            "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        },
        "vision_config": _GEMMA4_VISION,
        "tie_word_embeddings": False,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"}, "vision_config": {**_VISION, "model_type": "pixtral"},
        "tie_word_embeddings": False,
    },
    "mistral3-ministral3": {
        "text_config": {**_TEXT, "model_type": "ministral3"}, "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "qwen2_vl": {
        "text_config": {**_QWEN2_TEXT, "rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": {**_QWEN2_TEXT, "rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
        "vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        "vision_config": _QWEN_VISION,
        "tie_word_embeddings": True,
    },
    "llava": {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP},
    "llava_next": {"text_config": {**_TEXT, "model_type": "mistral"}, "vision_config": _CLIP},
    "llava_onevision": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "internvl": {"text_config": {**_TEXT, "model_type": "qwen3"}, "vision_config": _VISION},
    "idefics3": {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _VISION},
    "smolvlm": {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _VISION},
    "aya_vision": {
        "text_config": {**_TEXT, "model_type": "cohere2", "sliding_window": 24},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "cohere2_vision": {
        "text_config": {**_TEXT, "model_type": "cohere2", "sliding_window": 24},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "exaone4_5": {
        "text_config": {**_TEXT, "model_type": "exaone4", "sliding_window": 24}, "vision_config": _QWEN_VISION,
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
        "vision_config": _QWEN_VISION, "tie_word_embeddings": False,
    },
    "gemma4_unified": {"text_config": _GEMMA4, "tie_word_embeddings": False},
    "lfm2_vl": {
        "text_config": {**_TEXT, "model_type": "lfm2", "layer_types": ["full_attention"] * 3},
        "vision_config": {**_VISION, "model_type": "siglip2_vision_model"},
    },
}  # fmt: skip
"""Configs by type, with a suffix for each further form of a type."""


def write_wrapper(path: Path, name: str) -> PreTrainedModel:
    """Write the checkpoint `name` of `WRAPPERS` into `path` and return the whole model in float32."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.partition("-")[0]](**WRAPPERS[name])
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():  # Some classes begin with norms of zero and weights of one scale.
            if weight.dim() > 1:
                weight.normal_(0.0, 0.15)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return model
