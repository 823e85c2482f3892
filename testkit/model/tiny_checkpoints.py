"""Tiny random checkpoints of every architecture, in the format users have on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_WITHOUT_KV_HEADS = {name: value for name, value in _COMMON.items() if name != "num_key_value_heads"}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
SHARED_KV: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 6,
    "layer_types": LAYER_TYPES * 2,
    "num_kv_shared_layers": 3,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
"""Fields of a Gemma whose last three layers use the keys and values of earlier ones."""


def _with(**changes: Any) -> dict[str, Any]:
    return {**_COMMON, **changes}


# Names are model types, with a suffix for each further form of a type. Windows of 24 tokens are shorter than most test
# prompts and no multiple of the block size.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _with(),
    "mistral-window": _with(sliding_window=24),
    "qwen2": _with(),
    "qwen2-window": _with(use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": _with(head_dim=32),
    "gemma": _with(head_dim=32),
    "gemma2-window": _with(head_dim=32, sliding_window=24, attn_logit_softcapping=5.0),
    "gemma3_text-window": _with(head_dim=32, sliding_window=24, sliding_window_pattern=2),
    "gemma3n_text-shared": _with(
        **SHARED_KV,
        intermediate_size=[128] * 6,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5] * 3 + [0.0] * 3,
    ),
    "gemma4_text-window": _with(
        head_dim=32,
        global_head_dim=64,
        sliding_window=24,
        layer_types=LAYER_TYPES,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "gemma4_text-shared": _with(**SHARED_KV, global_head_dim=64, use_double_wide_mlp=True),
    "gemma4_text-experts": _with(
        head_dim=32,
        global_head_dim=64,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        sliding_window=24,
        layer_types=LAYER_TYPES,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "phi": _with(),
    "phi3": _with(pad_token_id=0),
    "phi3-window": _with(sliding_window=24, pad_token_id=0),
    "gpt2": _GPT2,
    "gpt_neox": _WITHOUT_KV_HEADS,
    "opt": {**_WITHOUT_KV_HEADS, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "olmo": _with(),
    "olmo2": _with(),
    "olmo3-window": _with(sliding_window=24),
    "granite": _with(logits_scaling=4.0, attention_multiplier=0.1),
    "starcoder2-window": _with(sliding_window=24),
    "stablelm": _with(),
    "cohere": _with(),
    "cohere2-window": _with(sliding_window=24),
    "smollm3": _with(),
    "glm": _with(head_dim=16),
    "glm4": _with(head_dim=16),
    "exaone4-window": _with(sliding_window=24),
    "ernie4_5": _with(),
    "nemotron": _with(),
    "helium": _with(head_dim=16),
    "seed_oss": _with(head_dim=16),
    "apertus": _with(),
    "mixtral": _with(num_local_experts=4),
    "minimax_m2": _with(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "qwen2_moe": _with(**_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": _with(**_EXPERTS, head_dim=16),
    "olmoe": _with(num_experts=4, num_experts_per_tok=2),
    "gpt_oss-window": _with(head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
    "deepseek_v2": _with(**_LATENT, q_lora_rank=None),
    "deepseek_v3": _with(**_LATENT, q_lora_rank=48),
}

_DENSE_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip
LATENT_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": _with(
        **_LATENT, q_lora_rank=48, rope_interleave=True, mlp_layer_types=["dense", "sparse", "sparse"]
    ),
    "minicpm3": _with(**_DENSE_LATENT, scale_emb=1.0),
    "youtu": _with(**_DENSE_LATENT, embedding_initializer_range=0.15),
    "axk1": _with(**_LATENT, q_lora_rank=48, mlp_layer_types=["dense", "sparse", "sparse"]),
    "longcat_flash": {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 512, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2,
        "expert_ffn_hidden_size": 32, "head_dim": 16, **_DENSE_LATENT,
    },
}  # fmt: skip
"""Further types with latent attention. Names and fields are as in `ARCHITECTURES`."""

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "bos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
_DELTA_EXPERTS = {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 32,
}  # fmt: skip
_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}

# Hybrids: models with recurrent layers beside attention.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _with(**_DELTA),
    "qwen3_5_text-16": _with(**{**_DELTA, "linear_num_value_heads": 16}),
    "qwen3_5_text-48": _with(**{**_DELTA, "linear_num_value_heads": 48}),
    "qwen3_next": _with(**_DELTA_EXPERTS),
    "qwen3_5_moe_text": _with(**_DELTA_EXPERTS),
    "olmo_hybrid": _with(**{**_DELTA, "linear_num_value_heads": 16}),
    "nemotron_h": _with(
        layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention", "moe", "linear_attention"],
        head_dim=16, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2, chunk_size=32, expand=2,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
        n_group=1, topk_group=1,
    ),
    "granitemoehybrid": _with(
        **_MAMBA, num_hidden_layers=4, layer_types=["mamba", "mamba", "attention", "mamba"], num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=64, attention_multiplier=0.1,
    ),
    "bamba": _with(**_MAMBA, attn_layer_indices=[1], attn_rotary_emb=16),
    "falcon_h1": _with(**_MAMBA, mamba_d_ssm=128, head_dim=16),
    "lfm2": _with(**_CONV),
    "lfm2_moe": _with(**_CONV, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1),
}  # fmt: skip

# Models that the engine refuses: the config, and a pattern for the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kimi_linear": (
        _with(
            num_key_value_heads=4, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
            num_experts=4, num_experts_per_token=2, moe_intermediate_size=32,
        ),
        "recurrent layers call chunk_kimi_delta_attention",
    ),
    "mamba": ({"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2}, "mamba_selective_scan"),
    "bloom": ({"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "interface"),
    "mpt": ({"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 4}, "flat batch"),
    "falcon": (
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, "interface",
    ),
    "gptj": ({**_GPT2, "rotary_dim": 8}, "interface"),
    "t5": ({"vocab_size": VOCAB_SIZE, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16}, "encoder-decoder"),
}  # fmt: skip


def tiny_config(architecture: str) -> PretrainedConfig:
    """Return the config of one of the architectures above; large untied weights make random output vary."""
    return _config(architecture.partition("-")[0], (ARCHITECTURES | LATENT_ARCHITECTURES | HYBRIDS)[architecture])


def write_checkpoint(path: Path, architecture: str = "llama", with_tokenizer: bool = True, **changes: Any) -> Path:
    """Write a tiny random model (float32 safetensors) into `path`; `changes` replace fields of its config.

    The tokenizer has an end token if the config names one. Else an output ends with `max_tokens` alone.
    """
    config = tiny_config(architecture)
    config.update(changes)
    _write_weights(path, config)
    if with_tokenizer:
        tokenizer = tiny_tokenizer()
        if config.eos_token_id is None:
            tokenizer.eos_token = None
        tokenizer.save_pretrained(path)
    return path


def write_refused_checkpoint(path: Path, model_type: str) -> Path:
    """Write a tiny random model of one of the `REFUSED` types."""
    _write_weights(path, _config(model_type, REFUSED[model_type][0]))
    return path


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of up to `VOCAB_SIZE` entries, complete for any text, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog, and then some more of it"] * 8, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        chat_template="{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}",
    )


def _config(model_type: str, fields: dict[str, Any]) -> PretrainedConfig:
    defaults = {"bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.15}
    return CONFIG_MAPPING[model_type](**{"pad_token_id": 0, **defaults, **fields})


def _write_weights(path: Path, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto_class.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(path)
