"""Interface between transformers' recurrent layers and the backends of their state.

A mixer is the module of a recurrent layer that mixes positions. transformers computes it by functions of its module: a
convolution, and a rule that advances a state. `RecurrentPort` gives each mixer functions that pass these calls to the
current context instead. Two rules are known, and both are one form here, `RuleCall`:

    gated delta rule (Yang et al., 2024): the state forgets a value before it stores another one at the same key
    Mamba-2 (Dao and Gu, 2024): the state adds values
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from replicas.errors import UnsupportedModel
from replicas.model.attention.state_cache import StateCache, StateLayer
from replicas.model.batch.inputs import BatchInputs

_CONVOLUTION = "causal_conv1d_fn"
_UNREACHED = frozenset(
    {
        "causal_conv1d_update",
        "torch_recurrent_gated_delta_rule",
        "mamba2_selective_state_update",
        "mamba2_split_conv1d_scan_combined",
    }
)
"""Functions that mixers call with transformers' own cache, or in training."""
_GATES = frozenset({"in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj"})
"""Linear layers of the gated delta rule's gates."""
_LANES = 32
"""Numbers that torch's vectorized loops take at once on a CPU. It rounds those after the last 32 in another way."""


@dataclass(frozen=True, slots=True)
class ConvCall:
    """Causal convolution of each channel over the tokens of each sequence."""

    layer: int
    inputs: Tensor  # [num_tokens, num_channels]
    weight: Tensor  # [num_channels, width]
    bias: Tensor | None  # [num_channels]
    has_silu: bool = False
    """True if the output goes through SiLU."""


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """Parameters of a layer's gates. The decay is -e^rate softplus(input + bias), and beta the sigmoid of its input."""

    rates: Tensor  # [num_heads]
    bias: Tensor  # [num_heads]


@dataclass(frozen=True, slots=True)
class RuleCall:
    """Advance of the state S [num_heads, key_size, value_size] of one layer by the tokens of each sequence.

    A token's update is u = value, or with `beta` u = beta (value - e^decay S^T key). Then S becomes
    e^decay S + key u^T, and the output is S^T query.
    """

    layer: int
    query: Tensor  # [num_tokens, num_key_heads, key_size]; each key head serves num_heads / num_key_heads heads
    key: Tensor  # [num_tokens, num_key_heads, key_size]
    value: Tensor  # [num_tokens, num_heads, value_size]
    decay: Tensor  # [num_tokens, num_heads], at most 0
    beta: Tensor | None  # [num_tokens, num_heads]
    scale: float = 1.0
    """Factor of the queries."""
    has_norm: bool = False
    """True if queries and keys are first divided by their length."""
    gates: DeltaGates | None = None
    """Gates that make decay and beta of the numbers given; None: these are decay and beta."""

    def prepared(self) -> RuleCall:
        """Return the same call in float32, with nothing left to do before the rule."""
        query, key = (part.float().contiguous() for part in (self.query, self.key))
        if self.has_norm:
            query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        if self.scale != 1.0:
            query = query * self.scale
        decay, beta = self.decay.float(), None if self.beta is None else self.beta.float()
        if self.gates is not None:
            assert beta is not None, "only the gated delta rule has gates"
            decay = -self.gates.rates.float().exp() * functional.softplus(decay + self.gates.bias.float())
            beta = beta.sigmoid()
        return RuleCall(self.layer, query, key, self.value.float(), decay, beta)


class StateContext(Protocol):
    """Recurrent state of one forward pass."""

    def convolve(self, call: ConvCall) -> Tensor:
        """Return the convolution [num_tokens, num_channels] in the dtype of the inputs."""

    def advance(self, call: RuleCall) -> Tensor:
        """Advance the state; return the outputs, [num_tokens, num_heads, value_size].

        They are float32, or in the dtype of the queries.
        """


class StateBackend(Protocol):
    """Factory of the recurrent state of a forward pass."""

    def __call__(self, cache: StateCache, inputs: BatchInputs) -> StateContext:
        """Return the state of the chunks of `inputs`."""


class RecurrentPort:
    """Connection of one model's mixers to their current context."""

    def __init__(self, model: nn.Module) -> None:
        self.context: StateContext | None = None
        """Context of the running forward pass; None: attention alone."""
        self.layers: tuple[StateLayer, ...] = ()
        """Shapes of the states, in order of index; known once the model was probed."""
        self.backend: StateBackend | None = None
        """Backend of the states; None: plain torch."""
        self._model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
        self.mixers = [module for module in model.modules() if _CONVOLUTION in names_in_forward(module)]
        for mixer in self.mixers:
            mixer.forward = MethodType(self._forward_of(mixer), mixer)

    def pad_gates(self) -> None:
        """Make gates independent of the number of tokens, on a CPU.

        They are computed for a multiple of 32 tokens, if their heads are no multiple of 32. Called after linear layers
        have been replaced.
        """
        for mixer in self.mixers:
            for name, child in mixer.named_children():
                if name in _GATES:
                    child.register_forward_hook(_pad_rows)

    def _forward_of(self, mixer: nn.Module) -> FunctionType:
        """Return a copy of the mixer's `forward` whose functions are those of `MixerFunctions`."""
        forward = inspect.unwrap(type(mixer).forward)
        names = names_in_forward(mixer)
        known = MixerFunctions(self, int(mixer.layer_idx)).by_name()  # type: ignore[arg-type]
        kernels = {name for name in names if hasattr(forward.__globals__.get(name), "__wrapped__")}
        unknown = {name: self._refusal(name) for name in kernels - known.keys() - _UNREACHED}
        copied = FunctionType(
            forward.__code__,
            {**forward.__globals__, **known, **unknown},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        copied.__kwdefaults__ = forward.__kwdefaults__
        return copied

    def _refusal(self, name: str) -> Callable[..., Any]:
        def refuse(*_: object, **__: object) -> None:
            raise UnsupportedModel(self._model_type, f"its recurrent layers call {name}")

        return refuse


class MixerFunctions:
    """Functions of one mixer with the signatures of transformers' ones. Their tensors are [1, num_tokens, ...]."""

    def __init__(self, port: RecurrentPort, layer: int) -> None:
        self._port = port
        self._layer = layer

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by the names that mixers call."""
        return {
            _CONVOLUTION: self.convolve,
            "torch_chunk_gated_delta_rule": self.apply_delta_rule,
            "mamba2_chunk_scan": self.scan,
        }

    @property
    def _context(self) -> StateContext:
        assert self._port.context is not None, "a recurrent layer was called outside `using`"
        return self._port.context

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> Tensor:
        """Convolve channels [1, num_channels, num_tokens]; the result has the same shape."""
        assert activation in (None, "silu", "swish"), f"the activation {activation!r} of a convolution is not known"
        inputs = hidden_states[0].transpose(0, 1).contiguous()
        output = self._context.convolve(ConvCall(self._layer, inputs, weight, bias, has_silu=activation is not None))
        return output.transpose(0, 1)[None]

    def apply_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Apply the gated delta rule. `g` and `beta` may have more rows than there are tokens."""
        num_tokens = query.shape[1]
        call = RuleCall(
            self._layer,
            query=query[0],
            key=key[0],
            value=value[0],
            decay=g[0, :num_tokens],
            beta=beta[0, :num_tokens],
            scale=query.shape[-1] ** -0.5,
            has_norm=use_qk_l2norm_in_kernel,
        )
        return self._context.advance(call).to(query.dtype)[None], None

    def scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: object,
    ) -> Tensor:
        """Apply the rule of Mamba-2 to [1, num_tokens, num_heads, value_size]; the result is float32."""
        steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
        if dt_softplus:
            steps = by_rows(functional.softplus, steps)
        steps = steps.clamp(*dt_limit).float()
        values = hidden_states[0].float()
        call = RuleCall(
            self._layer,
            query=C[0].float(),
            key=B[0].float(),
            value=values * steps[..., None],
            decay=A.float() * steps,
            beta=None,
        )
        output = self._context.advance(call)
        return (output if D is None else output + D.float()[:, None] * values)[None]


def by_rows(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply an elementwise function to rows [num_rows, size], so that a row's result does not depend on their number.

    See `_LANES`.
    """
    if rows.shape[1] % _LANES == 0:
        return function(rows.contiguous())
    return function(functional.pad(rows, (0, 0, 0, -len(rows) % _LANES)))[: len(rows)]


def _pad_rows(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """Append rows of zeros to a linear layer's output [1, num_tokens, size], up to a multiple of 32."""
    if output.shape[2] % _LANES == 0 or output.device.type != "cpu":
        return output
    return functional.pad(output, (0, 0, 0, -output.shape[1] % _LANES))


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """Return the names of functions and attributes in the `forward` of the module's class."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)
