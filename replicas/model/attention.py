"""The seam between transformers' model code and whatever computes attention.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `attention_forward` once per layer. That
function hands the call to the context its own model is running under: a probe while loading, one
step's attention over the paged cache while serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from replicas.model.batch_inputs import BatchInputs
from replicas.model.kv_cache import AttentionLayer, KVCache

ATTENTION_NAME = "headway_paged"
_PORT_ATTRIBUTE = "headway_attention_port"
_LAYER_ATTRIBUTE = "headway_layer"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into scores, beside the causal order."""

    scale: float
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """[num_query_heads]: one more score per head that takes part in the softmax and has no value."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks for, for the `num_tokens` tokens of a flat batch."""

    layer: int
    query: Tensor
    """[num_tokens, num_query_heads, key_size]; strides are arbitrary."""
    key: Tensor
    """[num_tokens, num_kv_heads, key_size]"""
    value: Tensor
    """[num_tokens, num_kv_heads, value_size]"""
    scoring: Scoring
    window: int | None
    """A token sees itself and the window - 1 tokens before it; None: all before it."""
    extras: frozenset[str]
    """Names of other arguments that transformers gave a value."""


def with_dense_heads(tensor: Tensor) -> Tensor:
    """Return the tensor itself where the numbers of one head lie side by side, else a copy."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


class AttentionContext(Protocol):
    """Computes the attention of the forward pass that is running."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention output, [num_tokens, num_query_heads, value_size]."""
        ...


AttentionFactory = Callable[[KVCache, BatchInputs], AttentionContext]
"""Makes the attention of one forward pass: the seam for kernels of one device."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Requirements of a model on the attention that serves it."""

    layers: Sequence[AttentionLayer]
    block_size: int
    dtype: torch.dtype
    device: torch.device
    has_kernels: bool = False
    """Whether the compiled CPU kernels can be called, for this dtype."""


class AttentionPort:
    """Where the attention layers of one model find their context; several models can live in one process."""

    def __init__(self, model: nn.Module) -> None:
        self.number = next(_numbers)
        _ports[self.number] = self
        self.context: AttentionContext | None = None
        """Of the forward pass that is running."""
        for module in model.modules():
            setattr(module, _PORT_ATTRIBUTE, self)

    @contextmanager
    def using(self, context: AttentionContext) -> Iterator[None]:
        """Give the model's attention calls to `context` meanwhile."""
        assert self.context is None, "a model runs one forward pass at a time"
        self.context = context
        try:
            yield
        finally:
            self.context = None

    def attend(self, call: AttentionCall) -> Tensor:
        """Pass a call on to the current context."""
        assert self.context is not None, "attention was called outside `using`"
        return self.context.attend(call)


_numbers = count()
_ports: WeakValueDictionary[int, AttentionPort] = WeakValueDictionary()


@torch.library.custom_op(
    "headway::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? sinks, int port, Tensor layer, float scale, "
    "float? softcap, int? window) -> Tensor",
)
def _attend_opaquely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    port: int,
    layer: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """`AttentionPort.attend` for compiled code, which must not look inside; what it does to the cache is not seen.

    The layer's number is a tensor on the host: as a number it would be a constant of the compiled code.
    """
    scoring = Scoring(scale, softcap, sinks)
    call = AttentionCall(int(layer), query, key, value, scoring, window, extras=frozenset())
    return _ports[port].attend(call)


@_attend_opaquely.register_fake
def _attend_shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extras: object,
) -> tuple[Tensor, None]:
    """The function transformers calls: query, key and value are [1, num_heads, num_tokens, head_size].

    Returns [1, num_tokens, num_query_heads, value_size] and no attention weights.
    """
    port: AttentionPort = getattr(module, _PORT_ATTRIBUTE)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    softcap, window = softcap or None, sliding_window or None
    if torch.compiler.is_compiling():
        number: Tensor = getattr(module, _LAYER_ATTRIBUTE)
        output: Tensor = torch.ops.headway.attend(query, key, value, s_aux, port.number, number, scale, softcap, window)
    else:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        given = _given(module, attention_mask, extras)
        output = port.attend(
            AttentionCall(layer, query, key, value, Scoring(scale, softcap, s_aux), window, extras=given)
        )
    return output[None], None


def number_layers(model: nn.Module) -> None:
    """Give the attention layers of `model`, already on its device, their numbers in the form compiled code needs."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None:
            module.register_buffer(_LAYER_ATTRIBUTE, torch.tensor(module.layer_idx), persistent=False)


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; repeating it changes nothing.

    No mask function is registered under the name, so that transformers builds no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def _given(module: nn.Module, attention_mask: Tensor | None, extras: dict[str, object]) -> frozenset[str]:
    names = {name for name, value in extras.items() if isinstance(value, torch.Tensor) or value}
    if extras.get("is_causal", getattr(module, "is_causal", True)) is False:
        names.add("is_causal=False")
    if attention_mask is not None:
        names.add("attention_mask")
    return frozenset(names)
