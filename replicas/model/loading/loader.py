"""Loader of a model's weights and tokenizer; it also finds the model's attention layers and limits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from replicas.errors import ModelLoadError, UnsupportedModel
from replicas.model.attention.cpp import can_attend
from replicas.model.attention.fused_gates import fuse_gates
from replicas.model.attention.interface import AttentionContext, AttentionPort, AttentionSpec
from replicas.model.attention.kv_cache import AttentionLayer, LayerGroup, is_quantized
from replicas.model.attention.layer_groups import group_layers
from replicas.model.attention.probe import dry_forward, probe_attention
from replicas.model.attention.recurrent import StateContext
from replicas.model.attention.state_cache import StateLayer
from replicas.model.attention.state_select import StateSpec
from replicas.model.hardware.device import choose_device, choose_dtype
from replicas.model.hardware.huge_pages import move_to_huge_pages
from replicas.model.hardware.kernel_build import load_kernels
from replicas.model.hardware.limits import cpu_limit
from replicas.model.hardware.selfcheck import Agree, alone
from replicas.model.layers.embedding import guard_embedding
from replicas.model.layers.float8_linear import check_float8
from replicas.model.layers.fused_decoder import can_fuse
from replicas.model.layers.kept_experts import round_experts
from replicas.model.layers.latent_attention import store_checked_latents
from replicas.model.layers.linear import (
    choose_linears,
    choose_panels,
    kept_groups,
    kept_panels,
    plain_linear,
    rounded_parts,
)
from replicas.model.layers.ops import TorchLayerOps
from replicas.model.layers.optimize import compile_layers, cpu_modules, cuda_modules, optimize_model, panel_products
from replicas.model.layers.panels import PanelProducts, compile_panels
from replicas.model.layers.rounding import ROUNDINGS
from replicas.model.loading.config import read_config
from replicas.model.loading.facts import choose_max_model_len
from replicas.model.loading.options import ROUNDS_AGAIN, ModelOptions
from replicas.model.loading.weights import load_weights
from replicas.model.parallel.cut_logits import CutLogits
from replicas.model.parallel.joined_layers import join_layers
from replicas.model.parallel.rank_group import RankGroup
from replicas.model.parallel.shares import ModelCuts
from replicas.model.pooling.encoder import NoOutput, TextEncoder
from replicas.model.pooling.heads import PoolHead, classifier_head, embedding_head, score_head
from replicas.model.pooling.kinds import first_position, has_output_layer, is_two_sided, tells_pairs_apart
from replicas.model.pooling.tap import HiddenTap
from replicas.text.tokenizer_files import load_tokenizer

_log = logging.getLogger(__name__)

LENGTH_DEPENDENT_ENCODINGS = ("dynamic", "longrope")
"""Rotary position encodings that transformers changes once a sequence exceeds the model's original length."""

_PRODUCTS = frozenset(("linear", "mm", "addmm", "bmm", "baddbmm", "mv", "_grouped_mm", "_linear_pointwise"))
"""Products of torch, and of oneDNN through it."""

_MAX_SHOWN_TOKENS = 5
"""Most tokens that one note names."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model that is ready to run, and its constants."""

    model_id: str
    model: PreTrainedModel
    port: AttentionPort
    """Connection of the model's attention layers to the context of each forward pass."""
    hidden: HiddenTap
    """Tap of the hidden states that are pooled."""
    layers: tuple[AttentionLayer, ...]
    """Attention shapes of the layers with a KV cache, in order of index."""
    tokenizer: PreTrainedTokenizerFast | None
    """Tokenizer; None if the model's directory has no tokenizer files."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    has_kernels: bool = False
    """True if the compiled CPU kernels are loaded and support `dtype`."""
    weights: str = ""
    """Format of the weights in the checkpoint and in memory, for people; empty: not known."""
    is_batch_invariant: bool = False
    """True if the model computes with `BatchInvariantOps`, which need Triton."""
    notes: tuple[str, ...] = ()
    """Faults of the checkpoint with which it is served all the same, a sentence each."""
    head: PoolHead | None = None
    """Head of pooled outputs; None: the model has no pooling."""
    generates: bool = True
    """True if the model generates tokens."""
    two_sided_layers: tuple[AttentionLayer, ...] = ()
    """Attention shapes of the layers whose tokens see those behind them. They have no KV cache."""
    ranks: RankGroup | None = None
    """Ranks that have the other parts of the model; None: the model is whole."""

    @property
    def agree(self) -> Agree:
        """Agreement of the ranks that compute the model."""
        return alone if self.ranks is None else self.ranks.all_true

    @property
    def cut_logits(self) -> CutLogits | None:
        """Join of the logits of several ranks; None: `logits` returns those of all tokens."""
        return None if self.ranks is None else CutLogits(self.ranks, self.vocab_size)

    def ops(self) -> AbstractContextManager[object]:
        """Return the context in which the model's operations are those that it was loaded for."""
        if not self.is_batch_invariant:
            return nullcontext()
        from replicas.model.layers.batch_invariant import BatchInvariantOps  # Only torch for CUDA installs Triton.

        return BatchInvariantOps()  # type: ignore[no-untyped-call]

    @property
    def is_two_sided(self) -> bool:
        """True if a token sees the tokens behind it, so that a text is computed whole, without a KV cache."""
        return bool(self.two_sided_layers)

    @property
    def state_layers(self) -> tuple[StateLayer, ...]:
        """Shapes of the recurrent layers' states, in order of index; empty: the model has none."""
        return self.port.recurrent.layers

    def logits(
        self,
        context: AttentionContext,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Tensor | int,
        states: StateContext | None = None,
    ) -> Tensor:
        """Run a forward pass with attention by `context` and return logits [num_rows, vocab_size] in `dtype`.

        Of several ranks each returns the logits of its part of the tokens. `states` are those of recurrent layers.

        Ids and positions are [1, num_tokens] int64. `rows` [num_rows] int64 are the tokens whose logits are returned;
        0 means all.
        """
        with self.port.using(context, states), self.ops():
            output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows)
        logits: Tensor = output.logits[0]
        return logits

    def layer_groups(self, cache_dtype: torch.dtype) -> tuple[LayerGroup, ...]:
        """Return the groups of layers, each with block tables of its own, in a KV cache of `cache_dtype`."""
        return group_layers(self.layers, self.max_model_len, cache_dtype)

    def attention_spec(self, block_size: int, cache_dtype: torch.dtype | None = None) -> AttentionSpec:
        """Return the model's requirements on attention over blocks of `block_size` tokens.

        `cache_dtype` is the number format of the KV cache; None: the model's.
        """
        quantized = cache_dtype if cache_dtype is not None and is_quantized(cache_dtype) else None
        return AttentionSpec(
            self.layers,
            block_size,
            self.max_model_len,
            self.dtype,
            self.device,
            self.has_kernels,
            quantized,
            self.is_batch_invariant,
        )

    def state_spec(self, block_size: int) -> StateSpec:
        """Return the model's requirements on recurrent state with boundaries every `block_size` tokens."""
        return StateSpec(
            self.state_layers, block_size, self.dtype, self.device, self.is_batch_invariant, self.has_kernels
        )


def _default_num_threads() -> int:
    """Return torch's own number of threads, or less within a container that has less processors."""
    return max(1, min(torch.get_num_threads(), int(cpu_limit().num_cpus)))


def load_model(options: ModelOptions, ranks: RankGroup | None = None) -> LoadedModel:
    """Load the model that `options` names, move it to its device, probe its attention and optimize it.

    Of a model that several `ranks` compute together, the part of this rank is loaded.

    Raises:
        ModelLoadError: the files or the options cannot be used.
        UnsupportedModel: its architecture cannot be served.
    """
    if ranks is not None:
        _refuse_options(options, ranks.share.num_ranks)
    torch.set_num_threads(options.num_threads or _default_num_threads())
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    config = read_config(options.path)
    max_model_len = choose_max_model_len(longest_of(config), options.max_model_len)
    tokenizer = tokenizer_of(options.path)
    has_kernels = device.type == "cpu" and load_kernels(options.kernel_cache_dir, dtype)
    agree = alone if ranks is None else ranks.all_true
    products = choose_products(config, options, dtype, device, agree)
    rounds_again = options.quantization in ROUNDS_AGAIN
    cuts = None if ranks is None else ModelCuts(config, ranks.share)
    kept = kept_groups() if has_kernels and not rounds_again else None
    if products is not None:
        kept = kept_panels(products, options.quantization, rounds_again=rounds_again)
    elif cuts is not None and options.quantization != "none":
        kept = rounded_parts(dtype, has_kernels, options.quantization, rounds_again=rounds_again)
    weights = load_weights(options.path, config, dtype, device, kept=kept, cuts=cuts)
    model = weights.model.to(device).eval()  # Weights are there; some buffers may not be.
    remove_waits(model)
    if isinstance(model, TextEncoder) and tells_pairs_apart(config):
        model.pair_separator = getattr(tokenizer, "sep_token_id", None)
    generates = has_output_layer(config)
    head, head_notes = _pool_head(options.path, config, model, is_needed=not generates, is_cut=ranks is not None)
    vocab_size = config.get_text_config(decoder=True).vocab_size
    port = AttentionPort(model)
    two_sided = is_two_sided(config)
    layers = probe_attention(model, port, two_sided=two_sided)
    if store_checked_latents(model, port):
        layers = probe_attention(model, port)
    if port.recurrent.layers and device.type != "cpu" and options.compile_layers:
        raise ModelLoadError("compile_layers is true, which models with recurrent layers do not support on a GPU")
    if device.type == "cpu" and not generates and not isinstance(model, TextEncoder):
        model.set_output_embeddings(NoOutput(vocab_size))  # The layer would become a packed copy of the embedding.
    _optimize(model, port, layers, options, has_kernels, products, weights.largest, agree)
    if two_sided:
        _refuse_scoring(config, layers)
    port.recurrent.pad_gates()
    if device.type == "cuda":
        fuse_gates(port.recurrent)
    configured_ids, end_id = _configured_eos_token_ids(model), getattr(tokenizer, "eos_token_id", None)
    eos_token_ids = configured_ids if end_id is None else configured_ids | {end_id}
    is_batch_invariant = options.batch_invariant and _check_batch_invariance(model, port, layers, has_kernels)
    if ranks is not None:
        join_layers(model, ranks, vocab_size)
    return LoadedModel(
        model_id=options.path,
        model=model,
        port=port,
        hidden=HiddenTap(model),
        layers=() if two_sided else layers,
        two_sided_layers=layers if two_sided else (),
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size),
        dtype=dtype,
        device=device,
        has_kernels=has_kernels,
        weights=weights.description,
        is_batch_invariant=is_batch_invariant,
        notes=(
            *_tokenizer_notes(tokenizer, vocab_size),
            *(_eos_notes(configured_ids, tokenizer, vocab_size) if generates else ()),
            *head_notes,
        ),
        head=head,
        generates=generates,
        ranks=ranks,
    )


def _refuse_scoring(config: PretrainedConfig, layers: tuple[AttentionLayer, ...]) -> None:
    """Raise UnsupportedModel if two-sided attention has scores that are not served."""
    if any(layer.softcap is not None or layer.has_sinks for layer in layers):
        raise UnsupportedModel(config.model_type, "its two-sided attention has capped scores or sinks")


def _pool_head(
    path: str, config: PretrainedConfig, model: PreTrainedModel, *, is_needed: bool, is_cut: bool
) -> tuple[PoolHead | None, list[str]]:
    """Return the head of the model's pooled outputs, and a note if its files describe one that is not served.

    Raises:
        UnsupportedModel: the head is needed, since the model has no other output, and there is none.
    """

    def output_rows(token_ids: list[int]) -> Tensor:
        if is_cut:
            raise ModelLoadError(f"model {path!r} scores by tokens, which tensor_parallel_size does not support")
        weight = getattr(model.get_output_embeddings(), "weight", None)
        if not isinstance(weight, Tensor):
            raise ModelLoadError(f"model {path!r} scores by tokens, and its output layer is quantized")
        return weight[token_ids].detach().cpu()

    fault = "it has no output layer, and its files describe no pooling (modules.json)"
    try:
        head = classifier_head(path, config) or embedding_head(path, config) or score_head(path, config, output_rows)
    except ModelLoadError as error:
        head, fault = None, str(error)
        if not is_needed:
            return None, [f"the model has no pooling: {fault}"]
    if head is None and is_needed:
        raise UnsupportedModel(config.model_type, fault)
    return head, []


def choose_products(
    config: PretrainedConfig, options: ModelOptions, dtype: torch.dtype, device: torch.device, agree: Agree = alone
) -> PanelProducts | None:
    """Return the products with weights of 4 and 8 bits; None if there are none, or they become dense.

    They must work on all ranks that `agree`.

    Raises:
        ModelLoadError: `options` ask for them, and they do not work here.
    """
    is_rounded = options.quantization != "none"
    has_quantized = hasattr(config, "quantization_config") or hasattr(
        config.get_text_config(decoder=True), "quantization_config"
    )
    if device.type != "cuda" or not (is_rounded or has_quantized):
        return None
    if options.compile_layers:
        if is_rounded:
            raise ModelLoadError(f"compile_layers is true, which contradicts quantization ({options.quantization!r})")
        return None
    products = panel_products(dtype, device, agree, batch_invariant=options.batch_invariant)
    if products is None and is_rounded:
        raise ModelLoadError(f"quantization is {options.quantization!r}, whose kernels do not work on {device}")
    if products is not None and options.quantization == "fp8_w8a8":
        fault = check_float8(products.round_rows, dtype, device)
        if fault is not None:
            raise ModelLoadError(f"quantization is 'fp8_w8a8', whose products do not work on {device}: {fault}")
    return products


def _refuse_options(options: ModelOptions, num_ranks: int) -> None:
    """Raise ModelLoadError for an option that several ranks do not support."""
    if options.compile_layers or options.batch_invariant:
        name = "compile_layers" if options.compile_layers else "batch_invariant"
        raise ModelLoadError(f"{name} is true, which contradicts tensor_parallel_size ({num_ranks})")
    if options.quantization == "fp8_w8a8":
        raise ModelLoadError(
            f"quantization is 'fp8_w8a8', which contradicts tensor_parallel_size ({num_ranks}): scales of the inputs "
            "that it rounds would differ by rank; fp8 rounds weights alone"
        )


def remove_waits(model: PreTrainedModel) -> None:
    """Change `model` so that no forward pass reads token ids or positions back from the device.

    Without a padding token, transformers does not look for one. Position encodings that depend on the longest sequence
    never change: `choose_max_model_len` bounds sequences to the length from which they would.
    """
    if not isinstance(model, TextEncoder):
        model.config.pad_token_id = None
    for module in model.modules():
        if getattr(module, "rope_type", None) in LENGTH_DEPENDENT_ENCODINGS:
            module.rope_type = "fixed"


def _optimize(
    model: PreTrainedModel,
    port: AttentionPort,
    layers: tuple[AttentionLayer, ...],
    options: ModelOptions,
    has_kernels: bool,
    products: PanelProducts | None,
    largest: Mapping[str, Tensor],
    agree: Agree,
) -> None:
    """Replace modules of the model by the fastest ones for its device."""
    device, dtype = model.device, model.dtype
    if device.type == "cpu":
        if options.compile_layers:
            raise ModelLoadError("compile_layers is true, but the device is a CPU")
        if options.quantization in ("fp8", "fp8_w8a8"):
            round_experts(model, ROUNDINGS[options.quantization], None, largest)
        modules = cpu_modules(dtype, has_kernels, options.quantization)
        if isinstance(model, TextEncoder) and options.quantization == "none" and not options.batch_invariant:
            # Whole texts have many rows, for which oneDNN is faster.
            modules = replace(modules, make_linear=choose_linears(dtype, False, "none"))
        optimize_model(model, port, layers, modules)
        move_to_huge_pages(model)
        return
    if options.compile_layers and options.batch_invariant:
        raise ModelLoadError("compile_layers is true, which contradicts batch_invariant (true)")
    is_compiled = options.compile_layers and not can_fuse(model) and compile_layers(model, port)
    if device.type != "cuda":
        return
    if is_compiled:
        guard_embedding(model, TorchLayerOps())
        return
    if products is not None and options.quantization != "none":
        round_experts(model, ROUNDINGS[options.quantization], products, largest)
    make_linear = plain_linear if products is None else choose_panels(products, options.quantization)
    modules = cuda_modules(dtype, device, make_linear, agree, batch_invariant=options.batch_invariant)
    guard_embedding(model, modules.ops)
    optimize_model(model, port, layers, modules)
    compile_panels(model)


class _TorchProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that notes torch's products of 16-bit numbers, whose order of sums may depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _PRODUCTS and args[0].itemsize == 2:
            self.found.add(name)
        with self:  # A composite operation is made of others.
            decomposed = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if decomposed is NotImplemented else decomposed


def _refuse_torch_sums(
    model: PreTrainedModel, port: AttentionPort, layers: tuple[AttentionLayer, ...], has_kernels: bool
) -> None:
    """Raise ModelLoadError if torch adds up 16-bit numbers in the model on a CPU, and not the compiled kernels."""
    needed = f"batch_invariant is true; in {model.dtype} on a CPU that needs the compiled kernels"
    if not has_kernels:
        raise ModelLoadError(needed)
    if not can_attend(layers):
        raise ModelLoadError(f"{needed}, which do not support the sizes of the model's heads")
    with _TorchProducts() as products:
        dry_forward(model, port, [3, 4, 5, 6])
    if products.found:
        raise ModelLoadError(f"{needed}, and the model also uses torch's {', '.join(sorted(products.found))}")


def _check_batch_invariance(
    model: PreTrainedModel, port: AttentionPort, layers: tuple[AttentionLayer, ...], has_kernels: bool
) -> bool:
    """Return True if the model must compute with `BatchInvariantOps`; False on a CPU, where it need not.

    Raises:
        ModelLoadError: the kernels that it needs do not work here, or do not support the model.
        UnsupportedModel: its code has an operation without a batch-invariant kernel.
    """
    device, dtype = model.device, model.dtype
    if device.type == "cpu":
        if dtype != torch.float32:
            _refuse_torch_sums(model, port, layers, has_kernels)
        _log.info("batch_invariant changes nothing on a CPU: no sequence's tokens depend on others there")
        return False
    try:
        from replicas.model.layers.batch_invariant import check_products, refuse_others
    except ImportError as error:
        raise ModelLoadError(f"batch_invariant is true, which needs Triton: {error}") from error
    fault = check_products(dtype, device)
    if fault is not None:
        raise ModelLoadError(f"batch_invariant is true, and its kernels do not work here: {fault}")
    refuse_others(model.config.model_type, lambda: dry_forward(model, port, [3, 4, 5, 6]))
    return True


def tokenizer_of(model: str) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a model; None if its directory has no tokenizer files.

    Raises:
        ModelLoadError: it cannot be loaded.
    """
    directory = Path(model)
    if directory.is_dir() and not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return load_tokenizer(model)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot load the tokenizer of model {model!r}: {error}") from error


def _tokenizer_notes(tokenizer: PreTrainedTokenizerFast | None, vocab_size: int) -> Iterator[str]:
    """Yield a note if the tokenizer has tokens that the model has no row for."""
    known = {} if tokenizer is None else tokenizer.get_vocab()
    unknown = sorted((token_id, token) for token, token_id in known.items() if token_id >= vocab_size)
    if unknown:
        shown = ", ".join(f"`{token}` ({token_id})" for token_id, token in unknown[:_MAX_SHOWN_TOKENS])
        more = f" and {len(unknown) - _MAX_SHOWN_TOKENS} more" if len(unknown) > _MAX_SHOWN_TOKENS else ""
        yield f"the model has {vocab_size} tokens; its tokenizer also has {shown}{more}: texts with them are refused"


def _eos_notes(
    configured_ids: frozenset[int], tokenizer: PreTrainedTokenizerFast | None, vocab_size: int
) -> Iterator[str]:
    """Yield a note if the configs name end tokens outside the vocabulary, and one if they lack the tokenizer's."""
    unknown = sorted(token_id for token_id in configured_ids if not 0 <= token_id < vocab_size)
    if unknown:
        listed = ", ".join(map(str, unknown))
        yield f"the model has {vocab_size} tokens; its eos_token_id also names {listed}, which it never generates"
    token_id = None if tokenizer is None else tokenizer.eos_token_id
    if tokenizer is None or token_id is None or token_id in configured_ids or token_id >= vocab_size:
        return
    token, listed = f"`{tokenizer.eos_token}` ({token_id})", ", ".join(map(str, sorted(configured_ids))) or "none"
    yield f"eos_token_id ({listed}) lacks the tokenizer's end token {token}, which ends a sequence all the same"


def longest_of(config: PretrainedConfig) -> int | None:
    """Return the most tokens of a sequence that the position encoding serves unchanged; None: the config names none."""
    text_config = config.get_text_config(decoder=True)
    longest: int | None = getattr(text_config, "max_position_embeddings", None)
    if longest is not None:
        longest -= first_position(text_config)
    rope = getattr(text_config, "rope_parameters", None) or {}
    # Some models have an encoding for each type of layer.
    for encoding in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if longest is not None and encoding.get("rope_type") in LENGTH_DEPENDENT_ENCODINGS:
            # Beyond the original length these encodings change the rotation of every position in the forward pass: one
            # long sequence would change the other sequences of its batch.
            longest = min(longest, encoding.get("original_max_position_embeddings") or longest)
    return longest


def _configured_eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a sequence by the generation config, or else by the model's config."""
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        named = getattr(config, "eos_token_id", None)
        if named is not None:
            return frozenset(named if isinstance(named, list) else [named])
    return frozenset()
