"""Shares of a model: the config of the part that one rank of several computes, and the cuts of its weights.

Attention is cut by heads, feed-forward layers by their inner size, embedding and output layer by the vocabulary. A KV
head belongs to the ranks of its query heads: where there are more ranks than KV heads, several hold the same one.
The module imports no torch.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from replicas.errors import ModelLoadError, UnsupportedModel
from replicas.model.checkpoint.formats import Cut

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_RANKS = 8
"""Most ranks of a replica: GPUs of one machine."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """Place of one rank among the ranks of a model."""

    rank: int
    num_ranks: int

    def even(self, size: int, start: int = 0) -> range:
        """Return this rank's part of [start, start + size), which the number of ranks divides."""
        part = size // self.num_ranks
        return range(start + self.rank * part, start + (self.rank + 1) * part)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a whole model by which its weights are cut."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    key_size: int = 0
    """Size of the keys of all heads in a gated delta net."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Sizes:
        """Return the sizes that a config names."""
        num_heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        key_size = getattr(config, "linear_num_key_heads", 0) * getattr(config, "linear_key_head_dim", 0)
        return cls(num_heads, getattr(config, "num_key_value_heads", None) or num_heads, head_size, key_size)

    def kv_rows(self, share: Share, start: int = 0) -> range:
        """Return the rows of a rank's KV heads, of those that begin at `start`."""
        first = share.rank * self.num_kv_heads // share.num_ranks
        num_local = max(1, self.num_kv_heads // share.num_ranks)
        return range(start + first * self.head_size, start + (first + num_local) * self.head_size)


CutRule = Callable[[Shape, Sizes, Share], Cut]


def _evenly(dim: int) -> CutRule:
    """Return the rule of a dimension that is divided among the ranks."""
    return lambda shape, _, share: Cut(dim, (share.even(shape[dim]),))


def _halves(dim: int) -> CutRule:
    """Return the rule of a dimension with two parts, of which each is divided among the ranks."""

    def rule(shape: Shape, _: Sizes, share: Share) -> Cut:
        half = shape[dim] // 2
        return Cut(dim, (share.even(half), share.even(half, half)))

    return rule


def _kv_heads(_: Shape, sizes: Sizes, share: Share) -> Cut:
    return Cut(0, (sizes.kv_rows(share),))


def _query_key_value(_: Shape, sizes: Sizes, share: Share) -> Cut:
    num_query, num_key = (number * sizes.head_size for number in (sizes.num_heads, sizes.num_kv_heads))
    key, value = (sizes.kv_rows(share, start) for start in (num_query, num_query + num_key))
    return Cut(0, (share.even(num_query), key, value))


def _delta_channels(shape: Shape, sizes: Sizes, share: Share) -> Cut:
    """Cut the queries, keys and values of a gated delta net by heads: value heads go with their key heads."""
    starts = (0, sizes.key_size, 2 * sizes.key_size, shape[0])
    return Cut(0, tuple(share.even(end - start, start) for start, end in pairwise(starts)))


def _on_first_rank(shape: Shape, _: Sizes, share: Share) -> Cut:
    """Cut a bias that is added to a sum over ranks: one rank adds it."""
    dim = len(shape) - 1
    return Cut(dim, (range(shape[dim]),)) if share.rank == 0 else Cut(dim, (), shape[dim])


def _vocabulary(shape: Shape, _: Sizes, share: Share) -> Cut:
    num_rows = -(-shape[0] // share.num_ranks)
    first = min(share.rank * num_rows, shape[0])
    rows = range(first, min(first + num_rows, shape[0]))
    return Cut(0, (rows,), num_rows - len(rows))


_RULES: Mapping[str, CutRule] = {
    r"(.*\.)?embed_tokens\.weight|lm_head\.weight": _vocabulary,
    r".*\.(q|q_b|kv_b)_proj\.(weight|bias)|.*\.self_attn\.sinks": _evenly(0),
    r".*\.linear_attn\.(in_proj_[zab]\.weight|A_log|dt_bias)": _evenly(0),
    r".*\.linear_attn\.(in_proj_qkv|conv1d)\.weight": _delta_channels,
    r".*\.[kv]_proj\.(weight|bias)": _kv_heads,
    r".*\.qkv_proj\.(weight|bias)": _query_key_value,
    r".*\.(o|out|down)_proj\.weight|.*\.w2\.weight": _evenly(1),
    r".*\.(o|down)_proj\.bias": _on_first_rank,
    r".*\.(gate|up)_proj\.(weight|bias)|.*\.w[13]\.weight": _evenly(0),
    r".*\.mlp\.gate_up_proj\.weight": _halves(0),
    r".*\.experts\.gate_up_proj": _halves(1),
    r".*\.experts\.down_proj": _evenly(2),
}
"""Rules by the name of a tensor in the checkpoint. A tensor without a rule is whole on each rank."""
# Weights of its experts are transposed, and the columns of gate and up alternate.
_GPT_OSS_RULES: Mapping[str, CutRule] = {
    r".*\.experts\.gate_up_proj": _evenly(2),
    r".*\.experts\.gate_up_proj_bias": _evenly(1),
    r".*\.experts\.down_proj": _evenly(1),
    r".*\.experts\.down_proj_bias": _on_first_rank,
}
_CUT_TYPES: Mapping[str, Mapping[str, CutRule]] = {
    **{
        name: {}
        for name in (
            "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "glm4", "mixtral",
            "qwen2_moe", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3",
        )
    },
    "gpt_oss": _GPT_OSS_RULES,
}  # fmt: skip
"""Types of models that are cut, each with the rules in which it differs from the others."""
_DELTA_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_INNER_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


class ModelCuts:
    """Cuts of a model for one rank."""

    def __init__(self, config: PretrainedConfig, share: Share) -> None:
        """Check that the model of `config` can be cut.

        Raises:
            UnsupportedModel: models of its type are not cut.
            ModelLoadError: the number of ranks does not divide a size of the model.
        """
        if config.model_type not in _CUT_TYPES:
            raise UnsupportedModel(
                config.model_type,
                f"tensor_parallel_size is {share.num_ranks}, and models of that type run on one device alone: set it "
                "to 1",
            )
        refuse_indivisible(config, share.num_ranks)
        self._config = config
        self._share = share
        self._sizes = Sizes.of(config)
        self._rules = [(re.compile(name), rule) for name, rule in {**_RULES, **_CUT_TYPES[config.model_type]}.items()]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._share.num_ranks

    def cut(self, name: str, shape: Shape) -> Cut | None:
        """Return the cut of the tensor `name`; None: the rank holds it whole."""
        rule = next((rule for pattern, rule in self._rules if pattern.fullmatch(name)), None)
        return None if rule is None else rule(shape, self._sizes, self._share)

    def local_config(self) -> PretrainedConfig:
        """Return the config of a model with the heads, inner sizes and rows of the vocabulary of this rank."""
        local, num_ranks = copy.deepcopy(self._config), self._share.num_ranks
        local.head_dim = self._sizes.head_size
        local.num_attention_heads = self._sizes.num_heads // num_ranks
        local.num_key_value_heads = max(1, self._sizes.num_kv_heads // num_ranks)
        for name in (*_INNER_SIZES, *_DELTA_HEADS):
            if getattr(local, name, None) is not None:
                setattr(local, name, getattr(local, name) // num_ranks)
        local.vocab_size = -(-local.vocab_size // num_ranks)
        local.pad_token_id = None
        return local


def refuse_indivisible(config: PretrainedConfig, num_ranks: int) -> None:
    """Check that the number of ranks divides all sizes of a model.

    Raises:
        ModelLoadError: it does not; the error names the layer, its size and the numbers that work.
    """
    fault = next(_faults(config, num_ranks), None)
    if fault is None:
        return
    working = [number for number in range(1, MAX_RANKS + 1) if next(_faults(config, number), None) is None]
    *most, last = map(str, working)
    listed = f"{', '.join(most)} and {last} do" if most else f"only {last} does"
    raise ModelLoadError(f"tensor_parallel_size is {num_ranks}, which does not divide {fault}; {listed}")


def _faults(config: PretrainedConfig, num_ranks: int) -> Iterator[str]:
    """Yield the sizes that `num_ranks` does not divide, with their layers."""
    sizes = Sizes.of(config)
    if sizes.num_heads % num_ranks:
        yield f"the {sizes.num_heads} heads of self_attn.q_proj (num_attention_heads)"
    if sizes.num_kv_heads % num_ranks and num_ranks % sizes.num_kv_heads:
        yield f"the {sizes.num_kv_heads} heads of self_attn.k_proj (num_key_value_heads), nor is divided by them"
    for name in _DELTA_HEADS:
        if getattr(config, name, 0) % num_ranks:
            yield f"the {getattr(config, name)} heads of linear_attn.in_proj_qkv ({name})"
    for name in _INNER_SIZES:
        size = getattr(config, name, None)
        if size is not None and size % num_ranks:
            yield f"the inner size of the layers mlp.down_proj ({name}: {size})"
