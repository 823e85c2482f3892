"""Interface between transformers' model code and the attention backends.

A model that is loaded with `attn_implementation=ATTENTION_NAME` calls `attention_forward` once per layer. The function
passes the call to the current context of the model: a probe during loading, and one step's attention over the paged
cache during serving.
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

from replicas.model.attention.kv_cache import AttentionLayer, KVCache
from replicas.model.attention.recurrent import RecurrentPort, StateContext
from replicas.model.batch.inputs import BatchInputs

ATTENTION_NAME = "headway_paged"
_PORT_ATTRIBUTE = "headway_attention_port"
_LAYER_ATTRIBUTE = "headway_layer"
LATENT_ATTRIBUTE = "headway_latent"
"""Attribute of attention modules that compute with latent keys: their `LatentHeads`."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Parameters that turn a layer's products of queries and keys into scores."""

    scale: float
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """[num_query_heads]: one more score per head, which is part of the softmax and has no value."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention request of one layer for the `num_tokens` tokens of a flat batch."""

    layer: int
    query: Tensor  # [num_tokens, num_query_heads, key_size]. Strides are arbitrary, as those of key and value
    key: Tensor  # [num_tokens, num_kv_heads, key_size]
    value: Tensor  # [num_tokens, num_kv_heads, value_size]
    scoring: Scoring
    window: int | None
    """Number of tokens that a token sees, itself included; None: all tokens before it and itself."""
    extras: frozenset[str]
    """Names of the other arguments to which transformers gave a value."""


class AttentionContext(Protocol):
    """Attention of one forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output, [num_tokens, num_query_heads, value_size]."""


class LatentHeads(Protocol):
    """Products with which queries meet latent keys, and with which sums of latent values become outputs."""

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries [1, num_heads, num_tokens, latent key_size] for a layer's own queries."""

    def expand(self, output: Tensor) -> Tensor:
        """Return [num_tokens, num_heads, value_size] for attention's output, whose values are latent."""


AttentionBackend = Callable[[KVCache, BatchInputs], AttentionContext]
"""Factory of the attention of a forward pass; each implementation names its kernels in an attribute `kernels`."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Requirements of a model on its attention backend."""

    layers: Sequence[AttentionLayer]
    block_size: int
    max_model_len: int
    """Most tokens of one sequence."""
    dtype: torch.dtype
    device: torch.device
    has_kernels: bool = False
    """True if the compiled CPU kernels are loaded and support `dtype`."""
    quantized_cache: torch.dtype | None = None
    """Number format of a KV cache in 8 bits, int8 or float8_e4m3fn; None: the cache has `dtype`."""
    is_batch_invariant: bool = False
    """True if attention must not depend on the other sequences of a batch."""


class AttentionPort:
    """Connection of one model's attention layers to their current context. A process can have several models."""

    def __init__(self, model: nn.Module) -> None:
        self.number = next(_numbers)
        _ports[self.number] = self
        self.context: AttentionContext | None = None
        """Context of the running forward pass; None between passes."""
        self.recurrent = RecurrentPort(model)
        """Connection of the model's recurrent layers."""
        for module in model.modules():
            setattr(module, _PORT_ATTRIBUTE, self)

    @contextmanager
    def using(self, context: AttentionContext, states: StateContext | None = None) -> Iterator[None]:
        """Pass attention calls to `context`, and those of recurrent layers to `states`, until the block ends."""
        assert self.context is None, "a model runs one forward pass at a time"
        self.context, self.recurrent.context = context, states
        try:
            yield
        finally:
            self.context = self.recurrent.context = None

    def attend(self, call: AttentionCall) -> Tensor:
        """Pass a call to the current context and return its output."""
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
    """Call `AttentionPort.attend` from compiled code, which neither traces the call nor sees its writes to the cache.

    `layer` is a tensor: an int would become a constant of the compiled code.
    """
    call = AttentionCall(int(layer), query, key, value, Scoring(scale, softcap, sinks), window, extras=frozenset())
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
    """Compute a layer's attention; transformers calls this function.

    Query, key and value are [1, num_heads, num_tokens, head_size]. Returns [1, num_tokens, num_query_heads,
    value_size], and None in the place of the attention weights.
    """
    port: AttentionPort = getattr(module, _PORT_ATTRIBUTE)
    latent: LatentHeads | None = getattr(module, LATENT_ATTRIBUTE, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if latent is not None:
        query = latent.absorb(query)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    softcap, window = softcap or None, sliding_window or None
    if torch.compiler.is_compiling():
        number: Tensor = getattr(module, _LAYER_ATTRIBUTE)
        output: Tensor = torch.ops.headway.attend(query, key, value, s_aux, port.number, number, scale, softcap, window)
    else:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        scoring, given = Scoring(scale, softcap, s_aux), _given(module, attention_mask, extras)
        output = port.attend(AttentionCall(layer, query, key, value, scoring, window, given))
    return (output if latent is None else latent.expand(output))[None], None


def number_layers(model: nn.Module) -> None:
    """Give each attention layer of `model` its index as a tensor buffer on the host, for compiled code.

    Call it after the model was moved to its device.
    """
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None:
            module.register_buffer(_LAYER_ATTRIBUTE, torch.tensor(module.layer_idx), persistent=False)


def register_attention() -> None:
    """Register `ATTENTION_NAME` with transformers. Repeated calls change nothing.

    Without a mask function of that name, transformers builds no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def with_dense_heads(tensor: Tensor) -> Tensor:
    """Return `tensor` itself if the numbers of each head are contiguous, else a contiguous copy."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _given(module: nn.Module, attention_mask: Tensor | None, extras: dict[str, object]) -> frozenset[str]:
    names = {name for name, value in extras.items() if isinstance(value, torch.Tensor) or value}
    if extras.get("is_causal", getattr(module, "is_causal", True)) is False:
        names.add("is_causal=False")
    if attention_mask is not None:
        names.add("attention_mask")
    return frozenset(names)
