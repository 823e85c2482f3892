"""Probe of a model: dry forward passes that find its attention layers and refuse models that cannot be served."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from replicas.errors import UnsupportedModel
from replicas.model.attention.interface import AttentionCall, AttentionPort
from replicas.model.attention.kv_cache import AttentionLayer
from replicas.model.attention.recurrent import ConvCall, RuleCall
from replicas.model.attention.state_cache import StateLayer

# Arguments from transformers that do not change the attention of a causal decoder.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
_LOCAL_LAYER_TYPES = frozenset({"mlp", "moe"})
"""Types of layers that mix no positions."""
_KNOWN_LAYER_TYPES = _LOCAL_LAYER_TYPES | {"full_attention", "sliding_attention", "linear_attention", "hybrid", "conv"}


class _Recorder:
    """Context that records each call and returns zeros, so no call passes anything between positions."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []
        self.conv_calls: list[ConvCall] = []
        self.rule_calls: list[RuleCall] = []
        self._tensors: dict[tuple[object, ...], tuple[int, Tensor, Tensor]] = {}
        """First layer that used the same keys and values. The tensors are kept, so no later one takes their memory."""
        self.extras: set[str] = set()

    def attend(self, call: AttentionCall) -> Tensor:
        num_tokens, num_query_heads, key_size = call.query.shape
        source, *_ = self._tensors.setdefault(
            (*_identity(call.key), *_identity(call.value)), (call.layer, call.key, call.value)
        )
        self.layers.append(
            AttentionLayer(
                index=call.layer,
                num_query_heads=num_query_heads,
                num_kv_heads=call.key.shape[1],
                key_size=key_size,
                value_size=call.value.shape[2],
                window=call.window,
                softcap=call.scoring.softcap,
                has_sinks=call.scoring.sinks is not None,
                kv_source=None if source == call.layer else source,
                has_values_in_keys=_identity(call.value) == _identity(call.key[..., : call.value.shape[2]]),
            )
        )
        self.extras |= call.extras
        return call.value.new_zeros(num_tokens, num_query_heads, call.value.shape[2])

    def convolve(self, call: ConvCall) -> Tensor:
        self.conv_calls.append(call)
        return torch.zeros_like(call.inputs)

    def advance(self, call: RuleCall) -> Tensor:
        self.rule_calls.append(call)
        return torch.zeros_like(call.value)

    def state_layers(self) -> tuple[StateLayer, ...]:
        """Return the shapes of the recurrent layers, in order of index."""
        rules = {call.layer: call for call in self.rule_calls}
        layers = []
        for conv in sorted(self.conv_calls, key=lambda call: call.layer):
            shape = (conv.layer, conv.inputs.shape[1], conv.weight.shape[1])
            rule = rules.get(conv.layer)
            heads = () if rule is None else (rule.value.shape[1], *rule.key.shape[1:], rule.value.shape[2])
            layers.append(StateLayer(*shape, *heads))
        return tuple(layers)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return what two views of the same numbers have in common. A tensor without values has no address."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def refuse_config(config: PretrainedConfig) -> None:
    """Check the config alone, before any weight is read.

    Raises:
        UnsupportedModel: the config shows that the model cannot be served. The error has the model type and the reason.
    """
    if config.is_encoder_decoder:
        raise UnsupportedModel(config.model_type, "it is an encoder-decoder, not a decoder")
    text_config = config.get_text_config(decoder=True)
    unknown = set(getattr(text_config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if unknown:
        raise UnsupportedModel(config.model_type, f"it has layers of type {', '.join(sorted(unknown))}")


def probe_attention(
    model: PreTrainedModel, port: AttentionPort, *, two_sided: bool = False
) -> tuple[AttentionLayer, ...]:
    """Return the model's attention layers in order of index; note its recurrent layers in the port.

    Raises:
        UnsupportedModel: a layer calls neither attention nor a recurrence, or one of them twice; attention takes an
            unknown argument; or positions influence one another in another way.
    """
    model_type = model.config.model_type
    recorder, logits = dry_forward(model, port, [3, 4, 5, 6])
    _, changed = dry_forward(model, port, [7, 4, 5, 6])
    _check_calls(model.config, recorder, two_sided=two_sided)
    difference = (logits - changed).abs().amax(dim=-1)  # [4]
    tolerance = math.sqrt(torch.finfo(model.dtype).eps) * float(difference[0])
    if float(difference[1:].max()) > tolerance:
        raise UnsupportedModel(
            model_type, "positions influence one another outside attention (recurrent state, convolution or the like)"
        )
    port.recurrent.layers = recorder.state_layers()
    return tuple(sorted(recorder.layers, key=lambda layer: layer.index))


def probe_shapes(
    model: PreTrainedModel, port: AttentionPort | None = None, *, two_sided: bool = False
) -> tuple[AttentionLayer, ...] | None:
    """Return the attention layers of a model without values, on torch's device `meta`; None: its code needs values.

    The recurrent layers are noted in `port`.

    Raises:
        UnsupportedModel: as `probe_attention`, so far as shapes tell.
    """
    try:
        port = port or AttentionPort(model)
        recorder, _ = dry_forward(model, port, [3, 4, 5, 6])
    except UnsupportedModel as error:
        if "meta" in str(error).lower():  # torch names the device when an operation asks for a value.
            return None
        raise
    _check_calls(model.config, recorder, two_sided=two_sided)
    port.recurrent.layers = recorder.state_layers()
    return tuple(recorder.layers)


def dry_forward(model: PreTrainedModel, port: AttentionPort, token_ids: list[int]) -> tuple[_Recorder, Tensor]:
    """Run a forward pass whose attention gives zeros; return its recorder and logits [num_tokens, vocab_size] float32.

    Raises:
        UnsupportedModel: the model's code fails.
    """
    recorder = _Recorder()
    num_tokens = len(token_ids)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    with torch.inference_mode(), port.using(recorder, recorder):
        try:
            logits: Tensor = model(
                input_ids=torch.tensor([[token_id % vocab_size for token_id in token_ids]], device=model.device),
                position_ids=torch.arange(num_tokens, device=model.device)[None],
                use_cache=False,
                logits_to_keep=torch.arange(num_tokens, device=model.device),
            ).logits
        except UnsupportedModel:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedModel(
                model.config.model_type, f"its code does not accept a flat batch ({type(error).__name__}: {error})"
            ) from error
    return recorder, logits[0].float()


def _check_calls(config: PretrainedConfig, recorder: _Recorder, *, two_sided: bool) -> None:
    text_config = config.get_text_config(decoder=True)
    indices = [layer.index for layer in recorder.layers]
    if not indices:
        raise UnsupportedModel(config.model_type, "its code does not use transformers' attention interface")
    recurrent = [call.layer for call in recorder.conv_calls]
    ruled = [call.layer for call in recorder.rule_calls]
    types = getattr(text_config, "layer_types", None) or ()
    local = {index for index, layer_type in enumerate(types) if layer_type in _LOCAL_LAYER_TYPES}
    is_once = all(len(calls) == len(set(calls)) for calls in (indices, recurrent, ruled))
    called = {*indices, *recurrent}
    if not is_once or not set(ruled) <= set(recurrent) or called | local != set(range(text_config.num_hidden_layers)):
        raise UnsupportedModel(
            config.model_type,
            f"{len(called)} of its {text_config.num_hidden_layers} layers called attention or a known recurrence, "
            f"{len(indices) + len(recurrent)} calls in all; exactly one call per layer is needed (the others keep "
            "state in another way)",
        )
    unknown = recorder.extras - _HARMLESS - ({"is_causal=False"} if two_sided else set())
    if unknown:
        raise UnsupportedModel(config.model_type, f"its attention takes {', '.join(sorted(unknown))}")
