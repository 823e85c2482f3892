"""Models of real shapes with random weights, for machines without downloads.

The tokenizer is the bundled demo model's: prompts are token ids, and most ids of so large a vocabulary have no text.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from replicas.model.attention.interface import ATTENTION_NAME, AttentionPort, register_attention
from replicas.model.attention.probe import probe_attention
from replicas.model.layers.optimize import cuda_modules, optimize_model
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.pooling.tap import HiddenTap

_DEMO = Path(__file__).resolve().parents[2] / "replicas" / "demo"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
_BIAS_DEVIATION = 0.02


_SMOLLM2_135M = LlamaConfig(
    hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
    vocab_size=49152, max_position_embeddings=8192, rope_theta=100000.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
    **_SPECIAL_IDS,
)  # fmt: skip
_QWEN25_05B = Qwen2Config(
    hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
    vocab_size=151936, max_position_embeddings=32768, rope_theta=1000000.0, rms_norm_eps=1e-6,
    tie_word_embeddings=True, **_SPECIAL_IDS,
)  # fmt: skip
_QWEN3_06B = Qwen3Config(
    hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    intermediate_size=3072, vocab_size=151936, max_position_embeddings=40960, rope_theta=1000000.0, rms_norm_eps=1e-6,
    tie_word_embeddings=True, **_SPECIAL_IDS,
)  # fmt: skip
_QWEN35_08B = Qwen3_5TextConfig(
    hidden_size=1024, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
    intermediate_size=3584, vocab_size=248320, max_position_embeddings=40960, linear_num_key_heads=16,
    linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6, tie_word_embeddings=True, **_SPECIAL_IDS,
)  # fmt: skip
LLAMA_1B = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128_256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128_256, max_position_embeddings=8192, tie_word_embeddings=False,
)  # fmt: skip
GEMMA3_1B = Gemma3TextConfig(
    hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
    head_dim=256, vocab_size=262_144, max_position_embeddings=32_768, sliding_window=512, sliding_window_pattern=6,
)  # fmt: skip

SHAPES: dict[str, PretrainedConfig] = {
    "S": _SMOLLM2_135M,
    "Q": _QWEN25_05B,
    "Q3": _QWEN3_06B,
    "H": _QWEN35_08B,
}
"""Model shapes. S: SmolLM2-135M. Q: Qwen2.5-0.5B. Q3: Qwen3-0.6B. H: Qwen3.5-0.8B, a hybrid."""


def model_directory(parent: Path, shape: str) -> Path:
    """Return the directory of a bfloat16 model below `parent`; if missing, make it, always with the same weights."""
    directory = parent / shape
    if not (directory / "config.json").exists():
        _make(directory, shape)
    for name in _TOKENIZER_FILES:
        if not (directory / name).exists():
            shutil.copy(_DEMO / name, directory / name)
    return directory


def _make(directory: Path, shape: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[shape]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros could be skipped
                parameter.normal_(0, _BIAS_DEVIATION)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=False, **_SPECIAL_IDS)
    model.save_pretrained(directory)


def random_model(config: PretrainedConfig, dtype: torch.dtype, device: str) -> LoadedModel:
    """Return a model with random weights, made on the device."""
    register_attention()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
    loaded = with_paged_attention(model, dtype, torch.device(device))
    if device != "cpu":
        optimize_model(model, loaded.port, loaded.layers, cuda_modules(dtype, loaded.device))
    return loaded


def with_paged_attention(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Return a model without a tokenizer, with transformers' own layers and the replica's attention."""
    port = AttentionPort(model)
    return LoadedModel(
        model_id="bench",
        model=model,
        port=port,
        hidden=HiddenTap(model),
        layers=probe_attention(model, port),
        tokenizer=None,
        max_model_len=model.config.max_position_embeddings,
        vocab_size=model.config.vocab_size,
        eos_token_ids=frozenset(),
        dtype=dtype,
        device=device,
    )
