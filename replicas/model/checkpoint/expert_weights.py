"""Quantized weights of experts: which of them keep their bits, and how they form one layer. It imports no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from replicas.model.checkpoint.formats import QuantizedWeight, Weights, has_panels

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of the layers of transformers' experts."""
_ALL_EXPERTS = re.compile(rf"(.*\.experts)\.({GATE_UP}|{DOWN})")
_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_ORDERS = frozenset({".g_idx", ".weight_g_idx"})
_FEWEST_INPUTS = 32


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of the experts of one layer that keep their bits: each expert has the same sizes and format."""

    gate_up: tuple[tuple[QuantizedWeight, ...], ...]
    """Weights of each expert, whose outputs follow each other; a single one has the outputs of all experts."""
    down: tuple[tuple[QuantizedWeight, ...], ...]

    def names(self) -> set[str]:
        """Return the names of the weights."""
        return {weight.name for layer in (self.gate_up, self.down) for parts in layer for weight in parts}


def find_expert_weights(weights: Weights) -> dict[str, ExpertWeights]:
    """Return the weights of experts that keep their bits in panels, by the name of the experts' module.

    Either all weights of a module have the same format in panels, or all become dense.
    """
    whole: dict[str, dict[str, QuantizedWeight]] = defaultdict(dict)
    single: dict[str, dict[tuple[int, str], QuantizedWeight]] = defaultdict(dict)
    for name, weight in weights.quantized.items():
        if (match := _ALL_EXPERTS.fullmatch(name)) is not None:
            whole[match[1]][match[2]] = weight
        elif (match := _ONE_EXPERT.fullmatch(name)) is not None:
            single[match[1]][int(match[2]), match[3]] = weight
    found = {
        name: ExpertWeights(((parts[GATE_UP],),), ((parts[DOWN],),)) for name, parts in whole.items() if len(parts) == 2
    }
    found |= {name: experts for name, parts in single.items() if (experts := _of_single(parts)) is not None}
    return {name: experts for name, experts in found.items() if _have_panels(experts)}


def _of_single(parts: Mapping[tuple[int, str], QuantizedWeight]) -> ExpertWeights | None:
    """Return the weights of experts that the checkpoint has one by one; None: some are missing."""
    numbers = range(len(parts) // 3)
    if parts.keys() != {(number, name) for number in numbers for name in ("gate", "up", "down")}:
        return None
    return ExpertWeights(
        tuple((parts[number, "gate"], parts[number, "up"]) for number in numbers),
        tuple((parts[number, "down"],) for number in numbers),
    )


def _have_panels(experts: ExpertWeights) -> bool:
    return all(
        len({(weight.format.name, weight.layout, frozenset(weight.parts)) for parts in layer for weight in parts}) == 1
        and all(
            has_panels(weight) and weight.layout.num_inputs >= _FEWEST_INPUTS and _ORDERS.isdisjoint(weight.parts)
            for parts in layer
            for weight in parts
        )
        for layer in (experts.gate_up, experts.down)
    )
