"""Quantized weights of experts: which of them keep their bits, and how they form one layer. It imports no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from replicas.model.checkpoint.formats import QuantizedWeight, Weights, has_panels, has_plain_order

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
"""Names of the layers of transformers' experts: those without a gate have `UP`."""
_ALL_EXPERTS = re.compile(rf"(.*\.experts)\.({GATE_UP}|{DOWN})")
_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_MIXTRAL_NAMES = {"w1": "gate_proj", "w2": DOWN, "w3": UP}
_FEWEST_INPUTS = 32


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of the experts of one layer that keep their bits: each expert has the same sizes and format."""

    first_name: str
    """Name of the layer before the activation, `GATE_UP` or `UP`."""
    first: tuple[tuple[QuantizedWeight, ...], ...]
    """Weights of each expert, whose outputs follow each other; a single one has the outputs of all experts."""
    down: tuple[tuple[QuantizedWeight, ...], ...]

    @property
    def layers(self) -> dict[str, tuple[tuple[QuantizedWeight, ...], ...]]:
        """Weights of both layers by name."""
        return {self.first_name: self.first, DOWN: self.down}

    def names(self) -> set[str]:
        """Return the names of the weights."""
        return {weight.name for layer in (self.first, self.down) for parts in layer for weight in parts}


def find_down_weights(weights: Weights) -> dict[str, list[str]]:
    """Return the names of the weights of the last layer of experts, by the name of the experts in the checkpoint.

    There is one for each expert, in their order, or one for all of them.
    """
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name in (*weights.plain, *weights.quantized):
        if (match := _ALL_EXPERTS.fullmatch(name)) is not None and match[2] == DOWN:
            found[match[1]][0] = name
        elif (match := _ONE_EXPERT.fullmatch(name)) is not None and _MIXTRAL_NAMES.get(match[3], match[3]) == DOWN:
            found[match[1]][int(match[2])] = name
    return {experts: [names[number] for number in sorted(names)] for experts, names in found.items()}


def find_expert_weights(weights: Weights) -> dict[str, ExpertWeights]:
    """Return the weights of experts that keep their bits in panels, by the name of the experts in the checkpoint.

    Either all weights of a module have the same format in panels, or all become dense.
    """
    whole: dict[str, dict[str, QuantizedWeight]] = defaultdict(dict)
    single: dict[str, dict[tuple[int, str], QuantizedWeight]] = defaultdict(dict)
    for name, weight in weights.quantized.items():
        if (match := _ALL_EXPERTS.fullmatch(name)) is not None:
            whole[match[1]][match[2]] = weight
        elif (match := _ONE_EXPERT.fullmatch(name)) is not None:
            single[match[1]][int(match[2]), _MIXTRAL_NAMES.get(match[3], match[3])] = weight
    found = {
        name: ExpertWeights(GATE_UP, ((parts[GATE_UP],),), ((parts[DOWN],),))
        for name, parts in whole.items()
        if len(parts) == 2
    }
    found |= {name: experts for name, parts in single.items() if (experts := _of_single(parts)) is not None}
    return {name: experts for name, experts in found.items() if _have_panels(experts)}


def _of_single(parts: Mapping[tuple[int, str], QuantizedWeight]) -> ExpertWeights | None:
    """Return the weights of experts that the checkpoint has one by one; None: some are missing."""
    has_gate = (0, "gate_proj") in parts
    first = ("gate_proj", UP) if has_gate else (UP,)
    numbers = range(len(parts) // (len(first) + 1))
    if parts.keys() != {(number, name) for number in numbers for name in (*first, DOWN)}:
        return None
    return ExpertWeights(
        GATE_UP if has_gate else UP,
        tuple(tuple(parts[number, name] for name in first) for number in numbers),
        tuple((parts[number, DOWN],) for number in numbers),
    )


def _have_panels(experts: ExpertWeights) -> bool:
    return all(
        len({(weight.format.name, weight.layout, frozenset(weight.parts)) for parts in layer for weight in parts}) == 1
        and all(
            has_panels(weight) and weight.layout.num_inputs >= _FEWEST_INPUTS and has_plain_order(weight)
            for parts in layer
            for weight in parts
        )
        for layer in (experts.first, experts.down)
    )
