"""A tiny llama as a GGUF file, with its tokenizer inside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
_FACTORS = {
    GGMLQuantizationType.Q2_K: {80: 0.004, 82: 0.006},
    GGMLQuantizationType.Q3_K: {108: 0.001},
    GGMLQuantizationType.Q4_K: {0: 0.0002, 2: 0.001},
    GGMLQuantizationType.Q5_K: {0: 0.0001, 2: 0.001},
    GGMLQuantizationType.Q6_K: {208: 0.00004},
    GGMLQuantizationType.IQ4_NL: {0: 0.001},
    GGMLQuantizationType.IQ4_XS: {0: 0.00004},
}
"""Factors of the scales and minima of types that the library `gguf` cannot write, by their place in a block."""


def write_gguf(
    file: Path,
    checkpoint: Path,
    kind: GGMLQuantizationType | None = None,
    finer: GGMLQuantizationType | None = None,
) -> Path:
    """Write a llama checkpoint of float32 weights and a BPE tokenizer into `file`, as float32.

    With `kind` the layers' linear weights are of that type, those of values and the last of each layer of the type
    `finer` if it is given, as in llama.cpp's mixtures. The folder `dense` beside `file` gets a checkpoint of their
    values, as the library `gguf` reads them.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    num_heads, head_dim = config["num_attention_heads"], config["head_dim"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, checkpoint)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    dense = {}
    for name, values in load_file(checkpoint / "model.safetensors").items():
        heads = {"q_proj": num_heads, "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        if heads is not None:  # GGUF keeps the two halves of each head interleaved.
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        if kind is not None and name.endswith("_proj.weight"):
            its_kind = finer if finer is not None and name.split(".")[-2] in ("v_proj", "down_proj") else kind
            blocks = _quantized(values, its_kind)
            writer.add_tensor(stored, blocks, raw_dtype=its_kind)
            values = gguf.quants.dequantize(blocks, its_kind)
        else:
            writer.add_tensor(stored, values)
        if heads is not None:
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        dense[name] = np.ascontiguousarray(values)
    if kind is not None:
        shutil.copytree(checkpoint, file.parent / "dense", ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(dense, file.parent / "dense" / "model.safetensors", {"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _quantized(values: Array, kind: GGMLQuantizationType) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return the rows of a weight in blocks. Those of types that the library cannot write are random ones."""
    if kind not in _FACTORS:
        return gguf.quants.quantize(values, kind)
    rng = np.random.default_rng(len(values))
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // num_values, num_bytes), dtype=np.uint8)
    for place, factor in _FACTORS[kind].items():
        blocks[..., place : place + 2] = np.array([factor], np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    ids = dict(tokenizer["model"]["vocab"]) | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
