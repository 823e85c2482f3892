"""Tiny checkpoints with the files of sentence-transformers, and their vectors by transformers' own code and torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn import functional
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from testkit.model.tiny_checkpoints import tiny_config, tiny_tokenizer, write_checkpoint

PAIR_TEMPLATE = (
    "{% for message in messages %}{{ 'q: ' if message['role'] == 'query' else 'd: ' }}{{ message['content'] }}\n"
    "{% endfor %}answer:"
)
_MODULES = "sentence_transformers.models"


@dataclass(frozen=True)
class PoolingFiles:
    """Files of sentence-transformers that a checkpoint gets."""

    mode: str = "lasttoken"
    dense_size: int | None = None
    normalizes: bool = True
    prompts: Mapping[str, str] | None = None
    max_tokens: int | None = None

    def write(self, path: Path, hidden_size: int) -> None:
        """Write the files of a model with states of `hidden_size` numbers into its folder."""
        kinds = ["Transformer", "Pooling"] + ["Dense"] * (self.dense_size is not None) + ["Normalize"] * self.normalizes
        folders = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
        named = [
            {"idx": index, "name": str(index), "path": folder, "type": f"{_MODULES}.{kind}"}
            for index, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
        ]
        _write(path / "modules.json", named)
        pooling = {"word_embedding_dimension": hidden_size, "pooling_mode": self.mode, "include_prompt": True}
        _write(path / "1_Pooling" / "config.json", pooling)
        if self.dense_size is not None:
            _write_dense(path / "2_Dense", hidden_size, self.dense_size)
        _write(path / "config_sentence_transformers.json", {"prompts": dict(self.prompts or {})})
        if self.max_tokens is not None:
            _write(path / "sentence_bert_config.json", {"max_seq_length": self.max_tokens, "do_lower_case": False})


def write_embedder(path: Path, architecture: str, files: PoolingFiles, **changes: Any) -> Path:
    """Write a tiny random decoder that generates and embeds; its tokenizer puts an end token behind a text."""
    write_checkpoint(path, architecture, with_tokenizer=False, **changes)
    ending_tokenizer().save_pretrained(path)
    files.write(path, tiny_config(architecture).get_text_config(decoder=True).hidden_size)
    return path


_ENCODER = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 300, "initializer_range": 0.15, "pad_token_id": 0, "num_labels": 1,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "xlm-roberta": {**_ENCODER, "type_vocab_size": 1},
    "modernbert": {
        **_ENCODER, "local_attention": 16, "global_attn_every_n_layers": 3, "bos_token_id": 1, "eos_token_id": 2,
        "cls_token_id": 1, "sep_token_id": 2,
    },
    "nomic_bert": _ENCODER,
}  # fmt: skip
"""Fields of tiny configs of encoders. One of ModernBERT's layers sees all tokens, the others 8 on each side."""


def write_encoder(path: Path, family: str, files: PoolingFiles) -> Path:
    """Write a tiny random encoder; `gemma3_text` is a decoder whose attention is two-sided."""
    if family == "gemma3_text":
        fields = tiny_config("gemma3_text-window").to_dict() | {"use_bidirectional_attention": True}
        config = CONFIG_MAPPING[family](**{name: value for name, value in fields.items() if name != "architectures"})
    else:
        config = CONFIG_MAPPING[family](**ENCODERS[family])
    _write_model(path, AutoModel, config)
    files.write(path, config.hidden_size)
    return path


def write_classifier(path: Path, family: str) -> Path:
    """Write a tiny random cross-encoder with a head, of one of the `ENCODERS` or a decoder such as `qwen3`."""
    fields = ENCODERS.get(family)
    config = CONFIG_MAPPING[family](**fields) if fields else tiny_config(family)
    config.num_labels = 1
    _write_model(path, AutoModelForSequenceClassification, config)
    return path


def _write_model(path: Path, auto_class: Any, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    auto_class.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.sep_token = "<eos>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <eos> $B:1 <eos>:1",
        special_tokens=[("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)],
    )
    tokenizer.chat_template = None
    tokenizer.save_pretrained(path)
    if config.model_type == "bert":
        stored = json.loads((path / "tokenizer_config.json").read_text())
        names = ["input_ids", "token_type_ids", "attention_mask"]
        _write(path / "tokenizer_config.json", stored | {"model_input_names": names})


def write_yes_no_reranker(path: Path, architecture: str, true_token_id: int, false_token_id: int) -> Path:
    """Write a tiny random decoder that scores a pair of texts by the logits of two tokens."""
    write_checkpoint(path, architecture, with_tokenizer=False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = PAIR_TEMPLATE
    tokenizer.save_pretrained(path)
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    named = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.{kind}"}
        for index, (folder, kind) in enumerate(kinds.items())
    ]
    _write(path / "modules.json", named)
    scores = {"true_token_id": true_token_id, "false_token_id": false_token_id, "module_input_name": "causal_logits"}
    _write(path / "1_LogitScore" / "config.json", scores)
    return path


def ending_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer, which puts its end token behind a text, as those of embedding models do."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    return tokenizer


@torch.inference_mode()
def expected_vectors(path: Path, texts: Sequence[Sequence[int]], files: PoolingFiles) -> Tensor:
    """Return the vectors of token ids by transformers' own attention, one text at a time, [num_texts, size]."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    states = [model(input_ids=torch.tensor([list(token_ids)])).last_hidden_state[0] for token_ids in texts]
    pools = {"lasttoken": lambda state: state[-1], "cls": lambda state: state[0], "mean": lambda state: state.mean(0)}
    vectors = torch.stack([pools[files.mode](state) for state in states])
    if files.dense_size is not None:
        weights = _dense_weights(vectors.shape[1], files.dense_size)
        vectors = torch.tanh(functional.linear(vectors, weights["linear.weight"], weights["linear.bias"]))
    return functional.normalize(vectors, dim=-1) if files.normalizes else vectors


def _write_dense(path: Path, hidden_size: int, size: int) -> None:
    activation = "torch.nn.modules.activation.Tanh"
    _write(
        path / "config.json",
        {"in_features": hidden_size, "out_features": size, "bias": True, "activation_function": activation},
    )
    save_file(_dense_weights(hidden_size, size), path / "model.safetensors")


def _dense_weights(hidden_size: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(size, hidden_size, generator=generator) / hidden_size**0.5
    return {"linear.weight": weight, "linear.bias": torch.randn(size, generator=generator) / 10}


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
