"""Loading a model's weights and tokenizer, and finding out how it must be served."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from replicas.errors import ModelLoadError, UnsupportedModel
from replicas.model.attention import (
    ATTENTION_NAME,
    AttentionContext,
    AttentionPort,
    AttentionSpec,
    register_attention,
)
from replicas.model.compiled_layers import compile_layers
from replicas.model.fast_parts import cpu_parts, cuda_parts, speed_up
from replicas.model.fused_decoder import can_fuse
from replicas.model.huge_pages import move_to_huge_pages
from replicas.model.kernel_build import load_kernels
from replicas.model.kv_cache import AttentionLayer
from replicas.model.options import ModelOptions
from replicas.model.precision import choose_device, choose_dtype
from replicas.model.probe import probe_attention, refuse_config
from replicas.tokenizer_files import load_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what is constant about it."""

    model_id: str
    model: PreTrainedModel
    port: AttentionPort
    """Through which each forward pass gets its attention."""
    layers: tuple[AttentionLayer, ...]
    """One per layer, in order of index."""
    tokenizer: PreTrainedTokenizerFast | None
    """None where the model comes without one."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    has_kernels: bool = False
    """Whether the compiled CPU kernels can be called, for this dtype."""

    def logits(self, context: AttentionContext, input_ids: Tensor, position_ids: Tensor, rows: Tensor | int) -> Tensor:
        """Run a forward pass with attention by `context`; logits [num_rows, vocab_size] in the model's dtype.

        Ids and positions are [1, num_tokens] int64; `rows` [num_rows] int64 are the tokens wanted, 0 means all.
        """
        with self.port.using(context):
            output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows)
        logits: Tensor = output.logits[0]
        return logits

    def attention_spec(self, block_size: int) -> AttentionSpec:
        """Return what the model requires of the attention over blocks of `block_size` tokens."""
        return AttentionSpec(self.layers, block_size, self.dtype, self.device, self.has_kernels)


def load_model(options: ModelOptions) -> LoadedModel:
    """Load, move to the device and probe the model that `options` names.

    Raises:
        ModelLoadError: files or options cannot be used.
        UnsupportedModel: its architecture cannot be served.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    config = _load_config(options.path)
    refuse_config(config)
    max_model_len = _choose_max_model_len(config, options.max_model_len)
    tokenizer = _load_tokenizer(options.path)
    model = _load_weights(options.path, config, dtype).to(device).eval()
    port = AttentionPort(model)
    layers = probe_attention(model, port)
    has_kernels = device.type == "cpu" and load_kernels(options.kernel_cache_dir, dtype)
    _speed_up(model, port, layers, options, has_kernels)
    return LoadedModel(
        model_id=options.path,
        model=model,
        port=port,
        layers=layers,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        eos_token_ids=_eos_token_ids(model),
        dtype=dtype,
        device=device,
        has_kernels=has_kernels,
    )


def _speed_up(
    model: PreTrainedModel,
    port: AttentionPort,
    layers: tuple[AttentionLayer, ...],
    options: ModelOptions,
    has_kernels: bool,
) -> None:
    """Give the model the fastest parts there are for its device."""
    device, dtype = model.device, model.dtype
    if device.type == "cpu":
        if options.compile_layers:
            raise ModelLoadError("compile_layers is true, but the device is a CPU")
        speed_up(model, port, layers, cpu_parts(dtype, has_kernels, options.quantization))
        move_to_huge_pages(model)
        return
    if options.quantization != "none":
        raise ModelLoadError(f"quantization is {options.quantization!r}, but the device is {device}, not a CPU")
    is_compiled = options.compile_layers and not can_fuse(model) and compile_layers(model, port)
    if device.type == "cuda" and not is_compiled:
        speed_up(model, port, layers, cuda_parts(dtype, device))


def _load_config(model: str) -> PretrainedConfig:
    if Path(model).is_absolute() and not Path(model).is_dir():
        raise ModelLoadError(f"model is {model!r}, and there is no such directory")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot read the config of model {model!r}: {error}") from error
    return config


def _load_weights(model: str, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    register_attention()
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model,
            # The attention implementation is stored on the config object: sharing one would switch another model.
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except OSError as error:
        raise ModelLoadError(f"cannot read the weights of model {model!r} (safetensors only): {error}") from error
    except KeyError as error:
        if ATTENTION_NAME not in str(error):
            raise
        raise UnsupportedModel(config.model_type, "its code does not use transformers' attention interface") from error
    except ValueError as error:
        raise UnsupportedModel(config.model_type, f"transformers cannot build it as a decoder: {error}") from error
    return loaded


def _load_tokenizer(model: str) -> PreTrainedTokenizerFast | None:
    directory = Path(model)
    if directory.is_dir() and not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return load_tokenizer(model)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot load the tokenizer of model {model!r}: {error}") from error


def _choose_max_model_len(config: PretrainedConfig, asked: int | None) -> int:
    """The asked length, or the longest that the model's position encoding serves unchanged."""
    text_config = config.get_text_config(decoder=True)
    longest: int | None = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if longest is not None and rope.get("rope_type") in ("dynamic", "longrope"):
        # Beyond its original length such a model rotates every position of a forward pass differently, so that one
        # long sequence would change its neighbours.
        longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    if longest is None and asked is None:
        raise ModelLoadError("the model's config names no max_position_embeddings; set max_model_len")
    if asked is not None and longest is not None and asked > longest:
        raise ModelLoadError(f"max_model_len is {asked}; the model serves at most {longest} tokens")
    if asked is not None and asked < 2:
        raise ModelLoadError(f"max_model_len is {asked}; a sequence needs at least 2 tokens")
    chosen = asked if asked is not None else longest
    assert chosen is not None
    return chosen


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a sequence: the generation config's, else the config's; both name one or a list."""
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        named = getattr(config, "eos_token_id", None)
        if named is not None:
            return frozenset(named if isinstance(named, list) else [named])
    return frozenset()
