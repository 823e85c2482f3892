"""Where a sequence ends and what its reader sees of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from replicas.engine.detokenizer import Detokenizer
from replicas.errors import SequenceFailed
from replicas.protocol import FinishReason, TokenDelta, Usage, merge
from testkit.engine.shadow_runner import World, config, continuation, request


class Spelling:
    """Token i is the i-th character of an alphabet."""

    def __init__(self, alphabet: str) -> None:
        self._alphabet = alphabet

    def push(self, token_id: int) -> str:
        return self._alphabet[token_id]


def spell(text: str, *stop: str, may_stop_from: int = 0) -> tuple[list[str], str | None]:
    """Each character's shown text, and the stop string found."""
    detokenizer = Detokenizer(Spelling(text), stop)
    shown = []
    for index in range(len(text)):
        shown.append(detokenizer.push(index, index >= may_stop_from))
        if detokenizer.stop_string is not None:
            return shown, detokenizer.stop_string
    shown.append(detokenizer.finish())
    return shown, None


def test_text_before_a_stop_string_is_shown_and_nothing_after() -> None:
    shown, stop = spell("hello END more", "END")
    assert "".join(shown) == "hello " and stop == "END"


def test_possible_beginning_of_a_stop_string_is_held_back_until_decided() -> None:
    shown, stop = spell("aab", "aac")
    assert shown == ["", "", "aab", ""] and stop is None


def test_held_text_is_shown_at_the_end() -> None:
    shown, stop = spell("xEN", "END")
    assert "".join(shown) == "xEN" and stop is None


def test_earliest_stop_string_wins() -> None:
    shown, stop = spell("one two", "two", "ne")
    assert "".join(shown) == "o" and stop == "ne"


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    shown, stop = spell("ab ab ab", "ab", may_stop_from=5)
    assert "".join(shown) == "ab ab " and stop == "ab"


@pytest.mark.parametrize("seed", range(200))
def test_shown_text_is_the_text_up_to_the_first_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(30))
    stops = tuple("".join(rng.choice("ab") for _ in range(rng.randint(2, 7))) for _ in range(rng.randint(1, 3)))
    shown, stop = spell(text, *stops)
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    if not ends:
        assert "".join(shown) == text and stop is None
    else:
        # The first to be complete, and among those complete at once the one that starts first.
        assert "".join(shown) == text[: min(ends)[1]]


def test_eos_ends_unless_ignored_and_its_text_is_not_shown() -> None:
    third = continuation((1, 2, 3), 8)
    eos = next(token for index, token in enumerate(third) if index >= 2 and token not in third[:index])
    end = third.index(eos) + 1
    world = World(config(eos_token_ids=frozenset({eos})))
    world.add(request("stops", max_tokens=8))
    world.add(request("ignores", max_tokens=8, ignore_eos=True))
    world.add(request("named", max_tokens=8, ignore_eos=True, stop_token_ids=(eos,)))
    world.run()
    stops, ignores, named = (world.outcomes[name] for name in ("stops", "ignores", "named"))
    assert (tuple(stops.token_ids), stops.finish_reason) == (third[:end], FinishReason.STOP)
    assert (len(ignores.token_ids), ignores.finish_reason) == (8, FinishReason.LENGTH)
    assert (tuple(named.token_ids), named.finish_reason) == (third[:end], FinishReason.STOP)
    assert stops.last is not None and stops.last.stop_reason is None
    assert named.last is not None and named.last.stop_reason == eos
    assert ignores.text.startswith(stops.text) and len(ignores.text) > len(stops.text)


def test_stop_string_ends_the_sequence_at_the_source() -> None:
    world = World(config())
    world.add(request("whole", max_tokens=20))
    world.run()
    whole = world.outcomes["whole"].text
    world.add(request("cut", max_tokens=20, stop=(whole[3:6],)))
    world.run()
    cut = world.outcomes["cut"]
    assert cut.text == whole[: whole.index(whole[3:6])] and cut.finish_reason is FinishReason.STOP
    assert len(cut.token_ids) < 20
    assert cut.last is not None and cut.last.stop_reason == whole[3:6]


@pytest.mark.parametrize("num_had", [1, 3, 4, 7])
def test_output_goes_on_behind_what_another_replica_gave(num_had: int) -> None:
    world = World(config())
    world.add(request("whole", max_tokens=20))
    world.run()
    whole = world.outcomes["whole"]
    stop = whole.text[8:11]
    had = World(config())
    had.add(request("first", max_tokens=20, stop=(stop,)))
    while len(had.outcomes["first"].token_ids) < num_had:
        had.step()
    shown = had.outcomes["first"].text
    output = tuple(had.outcomes["first"].token_ids)
    world.add(replace(request("second", max_tokens=20, stop=(stop,)), output_token_ids=output))
    world.run()
    second = world.outcomes["second"]
    assert tuple(second.token_ids) == tuple(whole.token_ids[: len(second.token_ids)])
    assert shown + second.text == whole.text[: whole.text.index(stop)]
    assert second.last is not None and second.last.usage.completion_tokens == len(second.token_ids)


def test_prompt_can_be_scored_without_generating() -> None:
    world = World(config(max_num_batched_tokens=9))
    world.add(request(prompt=tuple(range(30)), max_tokens=0, prompt_logprobs=0))
    world.run()
    outcome = world.outcomes["r"]
    assert outcome.token_ids == [] and outcome.finish_reason is FinishReason.LENGTH
    assert [entry.chosen.token_id for entry in outcome.prompt_logprobs] == list(range(1, 30))


def test_failing_sequence_fails_alone() -> None:
    world = World(config())
    poison = 96
    world.runner.fail_on = frozenset({poison})
    world.add(request("good", (1, 2, 3), max_tokens=1))
    world.add(request("bad", (1, poison, 3), max_tokens=1))
    world.run()
    good, bad = world.outcomes["good"], world.outcomes["bad"]
    assert tuple(good.token_ids) == continuation((1, 2, 3), 1)
    assert bad.last is not None and isinstance(bad.last.error, SequenceFailed)


def test_device_that_fails_everything_ends_the_engine() -> None:
    world = World(config())
    world.runner.fail_on = frozenset(range(97))
    world.add(request("a"))
    world.add(request("b"))
    with pytest.raises(RuntimeError, match="the device failed"):
        world.step()


def delta(rng: random.Random, start: int, last: bool = False) -> TokenDelta:
    token_ids = tuple(rng.randrange(9) for _ in range(rng.randint(0, 3)))
    text = "".join(map(str, token_ids))
    return TokenDelta(
        "r", start, token_ids, text, Usage(3, start, 0), finish_reason=FinishReason.STOP if last else None
    )


@pytest.mark.parametrize("seed", range(50))
def test_merging_is_associative(seed: int) -> None:
    rng = random.Random(seed)
    a = delta(rng, 0)
    b = delta(rng, len(a.token_ids))
    c = delta(rng, b.start + len(b.token_ids), last=True)
    assert merge([merge([a, b]), c]) == merge([a, merge([b, c])]) == merge([a, b, c])
