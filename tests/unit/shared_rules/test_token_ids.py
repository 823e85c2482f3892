"""An engine takes no token id that its model has no row for, whatever it came from."""

from dataclasses import replace
from typing import Any

import pytest

from replicas.errors import InvalidRequest
from replicas.protocol import GenerateRequest, LogitBias
from replicas.shared_rules.token_ids import first_outside
from testkit.engine.shadow_runner import World, config, continuation, request

VOCAB_SIZE = 97
PLACES: dict[str, dict[str, Any]] = {
    "stop_token_ids": {"stop_token_ids": (3, VOCAB_SIZE)},
    "allowed_token_ids": {"allowed_token_ids": (VOCAB_SIZE, 3)},
    "logit_bias": {"logit_bias": (LogitBias(3, 1.0), LogitBias(VOCAB_SIZE, -1.0))},
    "bad_words": {"bad_words": ((1, 2), (3, VOCAB_SIZE))},
    "visible_special_token_ids": {"visible_special_token_ids": (VOCAB_SIZE,)},
}


def refused(asked: GenerateRequest) -> InvalidRequest:
    world = World(config(vocab_size=VOCAB_SIZE))
    with pytest.raises(InvalidRequest) as refusal:
        world.add(asked)
    assert not world.engine.has_work
    world.run(request("next", (1, VOCAB_SIZE - 1)))
    assert tuple(world.outcomes["next"].token_ids) == continuation((1, VOCAB_SIZE - 1), 4)
    return refusal.value


@pytest.mark.parametrize("field", PLACES)
def test_parameters_with_an_unknown_token_are_refused(field: str) -> None:
    error = refused(request(prompt=(1, 2), **PLACES[field]))
    assert error.param == field
    assert f"token id {VOCAB_SIZE}" in error.message and f"{VOCAB_SIZE} tokens" in error.message


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1, 2**40, -(2**70)])
@pytest.mark.parametrize("place", [0, 5, 9])
def test_prompts_with_an_unknown_token_are_refused(place: int, token_id: int) -> None:
    prompt = [1] * 10
    prompt[place] = token_id
    assert refused(request(prompt=tuple(prompt))).param == "prompt"


def test_output_of_another_replica_with_an_unknown_token_is_refused() -> None:
    asked = replace(request(prompt=(1, 2), max_tokens=9), output_token_ids=(3, VOCAB_SIZE))
    assert refused(asked).param == "output_token_ids"


def test_the_first_unknown_id_is_named() -> None:
    assert first_outside((), 5) is None and first_outside((0, 4), 5) is None
    assert first_outside((0, 7, 9, -1), 5) == 7
