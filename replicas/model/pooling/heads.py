"""Heads: what follows the pooled hidden state, from the checkpoint's files, in float32 on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from replicas.errors import ModelLoadError, SequenceFailed
from replicas.model.pooling.files import (
    StoredModule,
    stored_max_tokens,
    stored_modules,
    stored_prompts,
    stored_settings,
    stored_weights,
)
from replicas.model.pooling.kinds import is_classifier, is_encoder
from replicas.protocol import PoolCard, Pooling, PoolParams, PoolTask

_POOLINGS = {"lasttoken": Pooling.LAST, "cls": Pooling.FIRST, "mean": Pooling.MEAN}
_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "GELU": nn.GELU, "Identity": nn.Identity, "ReLU": nn.ReLU, "SiLU": nn.SiLU, "Sigmoid": nn.Sigmoid, "Tanh": nn.Tanh,
}  # fmt: skip
_WITHOUT_EFFECT = ("Transformer", "Dropout")
"""Modules that change nothing behind the decoder."""
_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of decoders that change the logits behind the output layer."""

OutputRows = Callable[[list[int]], Tensor]
"""Function that returns the rows [num_tokens, hidden_size] of the output layer for these tokens."""


@dataclass(frozen=True, slots=True)
class PoolHead:
    """Head of a model: layers that make an output of a pooled hidden state."""

    card: PoolCard
    layers: nn.Sequential
    is_normalized: bool
    """True if outputs have length 1."""

    def pooler(self, params: PoolParams, num_tokens: int) -> TextPooler:
        """Return the pooler of a text of `num_tokens` tokens."""
        return TextPooler(self, params, num_tokens)

    @torch.inference_mode()
    def output(self, pooled: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Return the output of a pooled state, of its first `dimensions` numbers alone if they are given."""
        vector = self.layers(torch.from_numpy(pooled))[:dimensions]
        if self.is_normalized:
            vector = functional.normalize(vector, dim=-1)
        numbers: np.ndarray = vector.numpy()
        return numbers


class TextPooler:
    """Pooler of one text: adds up the states of its chunks, and gives the head their mean, or the one state."""

    def __init__(self, head: PoolHead, params: PoolParams, num_tokens: int) -> None:
        self._head = head
        self._params = params
        self._num_tokens = num_tokens
        self._sum: np.ndarray | None = None

    def push(self, start: int, pooled: np.ndarray) -> None:
        """Add the result of the tokens from position `start`; a result from position 0 begins anew."""
        is_first = start == 0 or self._params.pooling is not Pooling.MEAN
        self._sum = pooled if is_first or self._sum is None else self._sum + pooled

    def finish(self) -> bytes:
        """Return the output in float32, little-endian.

        Raises:
            SequenceFailed: it is not finite.
        """
        assert self._sum is not None, "no state was pooled"
        is_mean = self._params.pooling is Pooling.MEAN
        pooled = self._sum / np.float32(self._num_tokens) if is_mean else self._sum
        output = self._head.output(pooled, self._params.dimensions)
        if not np.isfinite(output).all():
            raise SequenceFailed("the model's hidden states are not finite numbers")
        return output.astype("<f4").tobytes()


def embedding_head(model: str, config: PretrainedConfig) -> PoolHead | None:
    """Return the head that the files of `model` describe for embeddings; None: they describe none.

    Raises:
        ModelLoadError: the files cannot be read, or a module is not supported.
    """
    modules = stored_modules(model)
    pooling = next((module for module in modules if module.kind == "Pooling"), None)
    if pooling is None:
        return None
    layers = [_layer(module) for module in modules if module.kind not in (*_WITHOUT_EFFECT, "Pooling", "Normalize")]
    sizes = [layer.out_features for dense in layers for layer in dense.modules() if isinstance(layer, nn.Linear)]
    prompts, shorter = stored_prompts(model), getattr(config, "matryoshka_dimensions", None)
    card = PoolCard(
        PoolTask.EMBED,
        _pooling_of(pooling),
        num_outputs=sizes[-1] if sizes else config.get_text_config(decoder=True).hidden_size,
        max_tokens=stored_max_tokens(model),
        can_shorten=bool(shorter or getattr(config, "is_matryoshka", False)),
        dimensions=tuple(shorter or ()),
        prompts=prompts.texts,
        default_prompt=prompts.default,
    )
    return PoolHead(card, nn.Sequential(*layers), modules[-1].kind == "Normalize")


def score_head(model: str, config: PretrainedConfig, output_rows: OutputRows) -> PoolHead | None:
    """Return the head that scores a text by the logits of tokens, such as yes and no; None: the files have none.

    Raises:
        ModelLoadError: the files cannot be read, or the model changes the logits of its output layer.
    """
    modules = stored_modules(model)
    score = next((module for module in modules if module.kind == "LogitScore"), None)
    if score is None:
        return None
    changing = [name for name in _SCALED_LOGITS if getattr(config, name, None) not in (None, 1.0)]
    if changing:
        raise ModelLoadError(f"model {model!r} scores by tokens, which its {changing[0]} prevents")
    token_ids = [score.settings["true_token_id"], score.settings.get("false_token_id")]
    rows = output_rows([token_id for token_id in token_ids if token_id is not None]).float()
    weight = rows[:1] - rows[1:] if len(rows) == 2 else rows
    activation = _activation(stored_settings(model).get("activation_fn"), "Sigmoid")
    card = PoolCard(PoolTask.SCORE, Pooling.LAST, num_outputs=1, max_tokens=stored_max_tokens(model))
    return PoolHead(card, nn.Sequential(_linear(weight, None), activation), is_normalized=False)


def classifier_head(model: str, config: PretrainedConfig) -> PoolHead | None:
    """Return the head of a checkpoint that scores texts with one label; None: it is no such checkpoint.

    Raises:
        ModelLoadError: it has several labels, or a head that is not known.
    """
    if not is_classifier(config):
        return None
    if config.num_labels != 1:
        raise ModelLoadError(f"it has {config.num_labels} labels; models with one, whose score it is, are served")
    weights = stored_weights(model, _CLASSIFIERS)
    layers = next((layers for names, layers in _heads_of(config) if set(names) <= weights.keys()), None)
    if layers is None:
        raise ModelLoadError(f"its head has the weights {', '.join(sorted(weights)) or 'none'}, which are not known")
    pooling = Pooling.FIRST if is_encoder(config) else Pooling.LAST
    if getattr(config, "classifier_pooling", "cls") == "mean":
        pooling = Pooling.MEAN
    own = getattr(config, "sentence_transformers", None) or {}
    named = own.get("activation_fn", getattr(config, "sbert_ce_default_activation_function", None))
    activation = _activation(stored_settings(model).get("activation_fn") or named, "Sigmoid")
    card = PoolCard(PoolTask.SCORE, pooling, num_outputs=1, max_tokens=stored_max_tokens(model))
    return PoolHead(card, nn.Sequential(*layers(weights), activation), is_normalized=False)


_CLASSIFIERS = ("bert.pooler.dense.", "classifier.", "head.", "score.")
"""Beginnings of the names of heads' weights."""
_Layers = Callable[[dict[str, Tensor]], list[nn.Module]]


def _heads_of(config: PretrainedConfig) -> list[tuple[tuple[str, ...], _Layers]]:
    """Return the known heads: names of weights that each has, and a function that makes its layers of the weights."""

    def linear(weights: dict[str, Tensor], name: str) -> nn.Linear:
        return _linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def modern(weights: dict[str, Tensor]) -> list[nn.Module]:
        norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias="head.norm.bias" in weights)
        own = {name.removeprefix("head.norm."): weight for name, weight in weights.items() if "head.norm." in name}
        norm.load_state_dict(own)
        return [linear(weights, "head.dense"), nn.GELU(), norm, linear(weights, "classifier")]

    return [
        (("score.weight",), lambda weights: [linear(weights, "score")]),
        (("head.dense.weight", "classifier.weight"), modern),
        (
            ("bert.pooler.dense.weight", "classifier.weight"),
            lambda weights: [linear(weights, "bert.pooler.dense"), nn.Tanh(), linear(weights, "classifier")],
        ),
        (
            ("classifier.dense.weight", "classifier.out_proj.weight"),
            lambda weights: [linear(weights, "classifier.dense"), nn.Tanh(), linear(weights, "classifier.out_proj")],
        ),
    ]


def _pooling_of(module: StoredModule) -> Pooling:
    modes = module.modes
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelLoadError(f"its pooling is {' and '.join(modes)}; {', '.join(sorted(_POOLINGS))} are served")
    if module.settings.get("include_prompt") is False:
        raise ModelLoadError("its pooling leaves out the prompt, which is not served")
    return _POOLINGS[modes[0]]


def _layer(module: StoredModule) -> nn.Module:
    """Return the layers of a module, which keeps the numbers of its input in float32."""
    settings = module.settings
    own = settings.get("module_input_name", "sentence_embedding") == "sentence_embedding"
    if module.kind == "Dense" and own and not settings.get("use_residual"):
        weights = module.weights()
        activation = _activation(settings.get("activation_function"), "Tanh")
        return nn.Sequential(_linear(weights["linear.weight"], weights.get("linear.bias")), activation)
    if module.kind == "LayerNorm":
        weights = module.weights()
        norm = nn.LayerNorm(len(weights["norm.weight"]))
        norm.load_state_dict({name.removeprefix("norm."): weight for name, weight in weights.items()})
        return norm
    raise ModelLoadError(f"its files have a module {module.kind} that is not served")


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return linear


def _activation(name: Any, default: str) -> nn.Module:
    """Return the activation of torch with this name, such as `torch.nn.modules.activation.Tanh`."""
    short = default if name is None else str(name).rpartition(".")[2]
    if short not in _ACTIVATIONS:
        raise ModelLoadError(f"its files have the activation {short}, which is not served")
    return _ACTIVATIONS[short]()
