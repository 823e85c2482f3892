"""Loader of a model's weights and tokenizer; it also finds the model's attention layers and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from replicas.errors import ModelLoadError, UnsupportedModel
from replicas.model.attention.fused_gates import fuse_gates
from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.kv_cache import AttentionLayer
from replicas.model.attention.probe import probe_attention
from replicas.model.hardware.device import choose_device, choose_dtype
from replicas.model.hardware.huge_pages import move_to_huge_pages
from replicas.model.hardware.kernel_build import load_kernels
from replicas.model.hardware.limits import cpu_limit
from replicas.model.hardware.processor import cpu_flags
from replicas.model.hardware.selfcheck import Agree, alone
from replicas.model.layers.embedding import guard_embedding
from replicas.model.layers.float8_linear import check_float8
from replicas.model.layers.fused_decoder import can_fuse
from replicas.model.layers.kept_experts import round_experts
from replicas.model.layers.latent_attention import store_checked_latents
from replicas.model.layers.linear import (
    KeptLinears,
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
from replicas.model.loading.batch_invariance import check_batch_invariance
from replicas.model.loading.config import read_config
from replicas.model.loading.facts import choose_max_model_len
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import ROUNDS_AGAIN, ModelOptions, Quantization
from replicas.model.loading.vocabulary import Vocabulary, tokenizer_of
from replicas.model.loading.weights import load_weights
from replicas.model.parallel.joined_layers import join_layers
from replicas.model.parallel.rank_group import RankGroup
from replicas.model.parallel.shares import ModelCuts
from replicas.model.pooling.encoder import NoOutput, TextEncoder
from replicas.model.pooling.heads import PoolHead, classifier_head, embedding_head, score_head
from replicas.model.pooling.kinds import first_position, has_output_layer, is_two_sided, tells_pairs_apart
from replicas.model.pooling.tap import HiddenTap

LENGTH_DEPENDENT_ENCODINGS = ("dynamic", "longrope")
"""Rotary position encodings that transformers changes once a sequence exceeds the model's original length."""


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
    cuts = None if ranks is None else ModelCuts(config, ranks.share)
    kept = _choose_kept(options.quantization, dtype, has_kernels, products, is_cut=cuts is not None)
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
    vocabulary = Vocabulary.of(model, tokenizer, vocab_size)
    is_batch_invariant = options.batch_invariant and check_batch_invariance(model, port, layers, has_kernels)
    if ranks is not None:
        join_layers(model, ranks, vocab_size)
    rounding = "" if options.quantization == "none" else f"; quantization {options.quantization}"
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
        eos_token_ids=vocabulary.eos_token_ids,
        dtype=dtype,
        device=device,
        has_kernels=has_kernels,
        weights=weights.description + rounding,
        is_batch_invariant=is_batch_invariant,
        notes=(*vocabulary.notes(generates=generates), *head_notes),
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


def _choose_kept(
    quantization: Quantization, dtype: torch.dtype, has_kernels: bool, products: PanelProducts | None, *, is_cut: bool
) -> KeptLinears | None:
    """Return the layers that keep the bits of a checkpoint or round weights while they are read; None: there are none.

    A whole model on a CPU rounds its layers later.
    """
    rounds_again = quantization in ROUNDS_AGAIN
    if products is not None:
        return kept_panels(products, quantization, rounds_again=rounds_again)
    if is_cut and quantization != "none":
        return rounded_parts(dtype, has_kernels, quantization, rounds_again=rounds_again)
    return kept_groups() if has_kernels and not rounds_again else None


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
        is_plain = options.quantization == "none" and not options.batch_invariant
        if isinstance(model, TextEncoder) and is_plain and "avx512f" in cpu_flags():
            # Whole texts have many rows, for which oneDNN is faster with AVX-512, and not without.
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
