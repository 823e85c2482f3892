"""Loading of weights into transformers' model code; quantized ones become dense one by one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from replicas.errors import ModelLoadError, UnsupportedModel
from replicas.model.attention.interface import ATTENTION_NAME, register_attention
from replicas.model.checkpoint.expert_weights import DOWN, ExpertWeights, find_down_weights, find_expert_weights
from replicas.model.checkpoint.formats import QuantizedWeight, Weights
from replicas.model.checkpoint.lazy_weights import LazyWeight, WeightReader
from replicas.model.checkpoint.weight_parts import cut_weights
from replicas.model.layers.experts import are_experts
from replicas.model.layers.kept_experts import kept_experts
from replicas.model.layers.linear import INPUTS_UNIT, KeptLinears, can_multiply
from replicas.model.loading.checks import read_weights
from replicas.model.parallel.shares import ModelCuts
from replicas.model.pooling.encoder import TextEncoder
from replicas.model.pooling.kinds import is_encoder
from replicas.text.tokenizer_files import HUB_FILES, UNUSED_HUB_FILES

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Model with its weights."""

    model: PreTrainedModel
    description: str
    """Format of the weights in the checkpoint and in memory, for people."""
    largest: Mapping[str, Tensor] = field(default_factory=dict)
    """Largest magnitudes of the rows of experts whose inputs are cut, for their rounding; see `round_experts`."""


def load_weights(
    model: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    *,
    kept: KeptLinears | None = None,
    cuts: ModelCuts | None = None,
) -> LoadedWeights:
    """Load the weights of a model, a directory or hub id, in `dtype`.

    Another `device` than the CPU receives each weight when it has been read: the host never holds the whole model.
    Weights of linear layers that `kept` keeps or rounds become its layers; without it all weights become dense.
    Of a model that is cut, `cuts` choose the part; `config` is that of the whole model.

    Raises:
        ModelLoadError: a file or a weight is missing, damaged or of a wrong shape.
        UnsupportedModel: transformers cannot build the model as a decoder.
    """
    directory = _directory_of(model)
    weights = read_weights(directory)
    if cuts is not None:
        config, weights = cuts.local_config(), cut_weights(weights, cuts.cut, cuts.num_ranks)
    reader = WeightReader(weights, dtype)
    state = reader.lazy()
    layers = _KeptLayers() if kept is None else _kept_layers(weights, config, kept)
    if cuts is not None and kept is not None and kept.rounds is not None:
        _refuse_cut_groups(weights, (*layers.rounded.values(), *chain(*layers.down.values())), cuts.num_ranks)
    linears, experts = layers.linears, layers.experts
    for name in {name for each in experts.values() for name in each.weights.names()}:
        del state[name]
    to_round = {name: state[name] for name in layers.rounded.values()}
    shapes = {weight.name: weight.layout.shape for weight in linears.values()}
    shapes |= {name: weights.shape_of(name) for name in layers.rounded.values()}
    for name, shape in chain(shapes.items(), *(each.shapes.items() for each in experts.values())):
        # Zeros that share one number in memory; the layer is replaced below.
        state[name] = LazyWeight(partial(torch.zeros(1, dtype=dtype, device=device).expand, shape))
    loaded = _build(model, config, dtype, state, None if device.type == "cpu" else str(device))
    for name, weight in linears.items():
        assert kept is not None
        linear = loaded.get_submodule(name)
        loaded.set_submodule(name, kept.make(reader.quantized(weight), linear.bias, linear.weight.dtype))
    for name, weight_name in layers.rounded.items():
        assert kept is not None and kept.rounds is not None
        linear = loaded.get_submodule(name)
        dense = to_round[weight_name][...].to(device, linear.weight.dtype)
        largest = reader.largest(weight_name).to(device) if _cuts_inputs(weights, weight_name) else None
        loaded.set_submodule(name, kept.make(kept.rounds(dense, largest), linear.bias, dense.dtype))
    for name, each in experts.items():
        assert kept is not None and kept.products is not None
        original = loaded.get_submodule(name)
        loaded.set_submodule(name, kept_experts(original, each.weights, reader.quantized, kept.products))
    with contextlib.suppress(OSError):  # There is no such file, or it cannot be read: the config's values stay.
        loaded.generation_config = GenerationConfig.from_pretrained(directory)
    kept_names = {weight.name for weight in linears.values()} | {
        name for each in experts.values() for name in each.weights.names()
    }
    description = weights.description(str(dtype).removeprefix("torch."), kept_names)
    largest_of_experts = {
        name: torch.cat([each if each.dim() == 2 else each[None] for each in map(reader.largest, names)]).to(device)
        for name, names in layers.down.items()
    }
    return LoadedWeights(_as_decoder(loaded, config), description, largest_of_experts)


def _refuse_cut_groups(weights: Weights, names: Iterable[str], num_ranks: int) -> None:
    """Raise ModelLoadError if a weight that is rounded has multiples of 32 inputs, and its part has not."""
    for name in names:
        cut, whole = weights.cut_of(name), weights.whole_shape_of(name)
        if cut is None or not _cuts_inputs(weights, name) or cut.size % INPUTS_UNIT == 0:
            continue
        num_units, rest = divmod(whole[cut.dim], INPUTS_UNIT)
        if rest == 0:
            working = ", ".join(str(number) for number in range(1, num_units + 1) if num_units % number == 0)
            raise ModelLoadError(
                f"tensor_parallel_size is {num_ranks}, which leaves {cut.size} of the {whole[cut.dim]} inputs of "
                f"{name}, and quantization rounds groups of {INPUTS_UNIT}; of these sizes {working} would not cut them"
            )


def _cuts_inputs(weights: Weights, name: str) -> bool:
    """Return True if other ranks hold inputs of a weight of a linear layer, or of the last layer of experts."""
    cut = weights.cut_of(name)
    return cut is not None and cut.dim > 0


@dataclass(frozen=True, slots=True)
class _KeptExperts:
    """Weights of experts that keep their bits, and the shapes of the dense ones, by name."""

    weights: ExpertWeights
    shapes: Mapping[str, torch.Size]


@dataclass(frozen=True, slots=True)
class _KeptLayers:
    """Layers whose weights have 4 or 8 bits, by the names of the model's modules."""

    linears: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    experts: Mapping[str, _KeptExperts] = field(default_factory=dict)
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Names of the dense weights that are rounded."""
    down: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the dense weights of experts that are rounded, and whose inputs are cut."""


def _kept_layers(weights: Weights, config: PretrainedConfig, kept: KeptLinears) -> _KeptLayers:
    kept_weights = {name: weight for name, weight in weights.quantized.items() if kept.keeps(weight)}
    if not kept_weights and kept.rounds is None:
        return _KeptLayers()
    model = _without_values(config)
    modules, names = dict(model.named_modules()), _ModelNames(model)
    found = {} if kept.products is None else find_expert_weights(weights)
    experts = {names.module_of(f"{name}.{DOWN}", DOWN): each for name, each in found.items()}

    def linears_of(weight_names: Iterable[str]) -> dict[str, str]:
        by_module = {names.module_of(name, "weight"): name for name in weight_names}
        return {module: name for module, name in by_module.items() if type(modules.get(module)) is nn.Linear}

    dense: Iterable[str] = ()
    down: dict[str, list[str]] = {}
    if kept.rounds is not None:
        dense = [name for name in (*weights.plain, *weights.quantized) if name not in kept_weights]
        if not kept.rounds_uncut:
            dense = [name for name in dense if _cuts_inputs(weights, name)]
        down = {
            names.module_of(f"{name}.{DOWN}", DOWN): each
            for name, each in find_down_weights(weights).items()
            if _cuts_inputs(weights, each[0])
        }
    return _KeptLayers(
        {module: kept_weights[name] for module, name in linears_of(kept_weights).items()},
        {
            name: _KeptExperts(each, {f"{name}.{layer}": getattr(modules[name], layer).shape for layer in each.layers})
            for name, each in experts.items()
            if name in modules and _fits(modules[name], each)
        },
        {
            module: name
            for module, name in linears_of(dense).items()
            # The output layer may be the embedding, or be read by a head.
            if names.is_unchanged(name)
            and modules[module] is not model.get_output_embeddings()
            and can_multiply(weights.whole_shape_of(name))
        },
        {
            module: each
            for module, each in down.items()
            if module not in experts and module in modules and are_experts(modules[module])
        },
    )


class _ModelNames:
    """Names of a model's modules, whose weights some checkpoints have under other names, which transformers changes."""

    def __init__(self, model: PreTrainedModel) -> None:
        changes = get_model_conversion_mapping(model)
        self._renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        self._others = [change for change in changes if not isinstance(change, WeightRenaming)]

    def module_of(self, weight: str, suffix: str) -> str:
        """Return the module of a weight of the checkpoint, without the weight's own name, `suffix`."""
        return self._renamed(weight).removesuffix(f".{suffix}")

    def is_unchanged(self, weight: str) -> bool:
        """Return True if transformers takes the weight's values as they are."""
        name = self._renamed(weight)
        return all(change.rename_source_key(name)[1] is None for change in self._others)

    def _renamed(self, weight: str) -> str:
        for renaming in self._renamings:
            weight, _ = renaming.rename_source_key(weight)
        return weight


def _fits(experts: nn.Module, weights: ExpertWeights) -> bool:
    """Return True if a module has experts with the layers of `weights`."""
    return are_experts(experts) and all(
        hasattr(experts, name)
        and getattr(experts, name).numel()
        == sum(weight.layout.num_outputs * weight.layout.num_inputs for parts in layer for weight in parts)
        for name, layer in weights.layers.items()
    )


def _plain(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of `config` without its quantization. `from_pretrained` writes to the config object it is given."""
    copied = copy.deepcopy(config)
    vars(copied).pop("quantization_config", None)
    return copied


def model_without_values(config: PretrainedConfig) -> PreTrainedModel:
    """Build the model of `config` on torch's device `meta`, whose weights have shapes and no values.

    Raises:
        UnsupportedModel: transformers cannot build the model as a decoder.
    """
    return _as_decoder(_without_values(config), config)


def _without_values(config: PretrainedConfig) -> PreTrainedModel:
    register_attention()
    with torch.device("meta"), _refusals(config):
        model: PreTrainedModel = _class_of(config)._from_config(
            _plain(config), attn_implementation=ATTENTION_NAME, **_without_pooler(config)
        )
    return model


def _as_decoder(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with the interface of a decoder."""
    return cast(PreTrainedModel, TextEncoder(model, config)) if is_encoder(config) else model


def _without_pooler(config: PretrainedConfig) -> dict[str, bool]:
    """Return the argument with which an encoder is built without the layer that transformers puts behind it."""
    return {"add_pooling_layer": False} if is_encoder(config) and config.model_type != "modernbert" else {}


def check_shapes(directory: Path, config: PretrainedConfig) -> PreTrainedModel:
    """Check that a checkpoint has all weights of the model of `config`, in their shapes; return it without values.

    Raises:
        ModelLoadError: it has not.
        UnsupportedModel: transformers cannot build the model as a decoder.
    """
    weights = read_weights(directory)
    shapes = {name: tensor.shape for name, tensor in weights.plain.items()}
    shapes |= {name: weight.layout.shape for name, weight in weights.quantized.items()}
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return _as_decoder(_build(str(directory), config, torch.bfloat16, state, device="meta"), config)


def _directory_of(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=UNUSED_HUB_FILES))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot fetch the weights of model {model!r}: {error}") from error


def _build(
    model: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    state: Mapping[str, LazyWeight] | Mapping[str, Tensor],
    device: str | None = None,
) -> PreTrainedModel:
    """Build transformers' model of `config` and fill it with the weights `state`; `device` None: on the CPU."""
    register_attention()
    with _refusals(config):
        loaded, report = _class_of(config).from_pretrained(
            None,
            config=_plain(config),
            state_dict=state,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            device_map=None if device is None else {"": device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with their names
            **_without_pooler(config),
        )
    _refuse_gaps(model, report)
    return loaded


@contextlib.contextmanager
def _refusals(config: PretrainedConfig) -> Iterator[None]:
    """Turn the errors with which transformers refuses to build a model into `UnsupportedModel`."""
    try:
        yield
    except KeyError as error:
        if ATTENTION_NAME not in str(error):
            raise
        raise UnsupportedModel(config.model_type, "its code does not use transformers' attention interface") from error
    except ValueError as error:
        raise UnsupportedModel(config.model_type, f"transformers cannot build it as a decoder: {error}") from error


def _class_of(config: PretrainedConfig) -> Any:
    """Return the class of the decoder of `config`, or of the encoder."""
    mapping = MODEL_MAPPING if is_encoder(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = mapping[type(config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _refuse_gaps(model: str, report: Mapping[str, Any]) -> None:
    """Refuse a model without all its weights; transformers fills the gaps with random numbers."""
    if report["mismatched_keys"]:
        name, shape, expected = min(report["mismatched_keys"])
        raise ModelLoadError(
            f"the weight {name} of model {model!r} has the shape {list(shape)}; the config asks for {list(expected)}"
        )
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ModelLoadError(f"model {model!r} lacks the weights {', '.join(names[:3])}{more}")
