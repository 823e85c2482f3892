"""Ends of sequences, and the text and deltas that readers see."""

import random
from dataclasses import replace
from typing import Any

import pytest

from replicas.engine.output_processor import Detokenizer
from replicas.errors import SequenceFailed
from replicas.protocol import FinishReason, GenerateRequest, TokenDelta, Usage, merge
from testkit.engine import shadow_runner
from testkit.engine.shadow_runner import LetterDecoder, World, config, continuation, request


class Spelling:
    """Token i is the i-th character of an alphabet."""

    def __init__(self, alphabet: str) -> None:
        self._alphabet = alphabet

    def push(self, token_id: int) -> str:
        return self._alphabet[token_id]

    def finish(self) -> str:
        return ""


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


@pytest.mark.parametrize(
    ("text", "stops", "shown", "found"),
    [
        ("hello END more", ("END",), "hello ", "END"),
        ("xEN", ("END",), "xEN", None),
        ("one two", ("two", "ne"), "o", "ne"),
    ],
    ids=["nothing after a stop string", "held text at the end", "the earliest stop string wins"],
)
def test_text_is_shown_up_to_a_stop_string(text: str, stops: tuple[str, ...], shown: str, found: str | None) -> None:
    pieces, stop = spell(text, *stops)
    assert ("".join(pieces), stop) == (shown, found)


def test_possible_stop_string_is_held_back_until_decided() -> None:
    assert spell("aab", "aac") == (["", "", "aab", ""], None)


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    shown, stop = spell("ab ab ab", "ab", may_stop_from=5)
    assert "".join(shown) == "ab ab " and stop == "ab"


@pytest.mark.sampled(40)
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
        # The first complete stop string ends the text; of several complete at once, the first to start.
        assert "".join(shown) == text[: min(ends)[1]]


def test_eos_ends_unless_ignored_and_its_text_is_not_shown() -> None:
    third = continuation((1, 2, 3), 8)
    eos = next(token for index, token in enumerate(third) if index >= 2 and token not in third[:index])
    end = third.index(eos) + 1
    world = World(config(eos_token_ids=frozenset({eos})))
    world.run(
        request("stops", max_tokens=8),
        request("ignores", max_tokens=8, ignore_eos=True),
        request("named", max_tokens=8, ignore_eos=True, stop_token_ids=(eos,)),
    )
    stops, ignores, named = (world.outcomes[name] for name in ("stops", "ignores", "named"))
    assert (len(ignores.token_ids), ignores.finish_reason) == (8, FinishReason.LENGTH)
    for outcome, stop_reason in ((stops, None), (named, eos)):
        assert (tuple(outcome.token_ids), outcome.finish_reason) == (third[:end], FinishReason.STOP)
        assert outcome.last is not None and outcome.last.stop_reason == stop_reason
    assert ignores.text.startswith(stops.text) and len(ignores.text) > len(stops.text)


def test_stop_string_ends_the_sequence_at_the_source() -> None:
    world = World(config())
    world.run(request("whole", max_tokens=20))
    whole = world.outcomes["whole"].text
    world.run(request("cut", max_tokens=20, stop=(whole[3:6],)))
    cut = world.outcomes["cut"]
    assert cut.text == whole[: whole.index(whole[3:6])] and cut.finish_reason is FinishReason.STOP
    assert len(cut.token_ids) < 20
    assert cut.last is not None and cut.last.stop_reason == whole[3:6]


@pytest.mark.parametrize("num_had", [1, 3, 4, 7])
def test_resumed_output_continues_that_of_another_replica(num_had: int) -> None:
    world = World(config())
    world.run(request("whole", max_tokens=20))
    whole = world.outcomes["whole"]
    stop = whole.text[8:11]
    had = World(config())
    had.add(request("first", max_tokens=20, stop=(stop,)))
    while len(had.outcomes["first"].token_ids) < num_had:
        had.step()
    shown = had.outcomes["first"].text
    output = tuple(had.outcomes["first"].token_ids)
    world.run(replace(request("second", max_tokens=20, stop=(stop,)), output_token_ids=output))
    second = world.outcomes["second"]
    assert tuple(second.token_ids) == tuple(whole.token_ids[: len(second.token_ids)])
    assert shown + second.text == whole.text[: whole.text.index(stop)]
    assert second.last is not None and second.last.usage.completion_tokens == len(second.token_ids)


def test_prompt_can_be_scored_without_generating() -> None:
    world = World(config(max_num_batched_tokens=9))
    world.run(request(prompt=tuple(range(30)), max_tokens=0, prompt_logprobs=0))
    outcome = world.outcomes["r"]
    assert outcome.token_ids == [] and outcome.finish_reason is FinishReason.LENGTH
    assert [entry.chosen.token_id for entry in outcome.prompt_logprobs] == list(range(1, 30))


def test_failing_sequence_fails_alone() -> None:
    world = World(config())
    poison = 96
    world.runner.fail_on = frozenset({poison})
    world.run(request("good", (1, 2, 3), max_tokens=1), request("bad", (1, poison, 3), max_tokens=1))
    good, bad = world.outcomes["good"], world.outcomes["bad"]
    assert tuple(good.token_ids) == continuation((1, 2, 3), 1)
    assert bad.last is not None and isinstance(bad.last.error, SequenceFailed)


def forced_world(**params: Any) -> tuple[World, GenerateRequest]:
    """A world, and a request for 12 tokens each of which is the only one allowed."""
    world = World(config())
    return world, request("forced", prompt=(1, 2, 3, 4, 5), max_tokens=12, grammar="1 99", **params)


def test_forced_tokens_take_no_step_of_their_own() -> None:
    world, asked = forced_world()
    world.run(asked)
    forced = world.outcomes["forced"]
    assert world.num_steps == 1 and forced.finish_reason is FinishReason.LENGTH
    sampled_world, asked = forced_world(logprobs=0)
    sampled_world.run(asked)
    assert forced.token_ids == sampled_world.outcomes["forced"].token_ids
    assert forced.text == sampled_world.outcomes["forced"].text
    assert sampled_world.num_steps == 12, "log probabilities come from steps"


def test_a_long_forced_text_takes_several_steps_and_delays_no_decode() -> None:
    world = World(config(max_num_batched_tokens=6, max_num_seqs=4))
    world.add(request("long", prompt=(1, 2, 3, 4, 5), max_tokens=60, grammar="1 99"))
    world.steps_until_first_token("long")
    world.add(request("other", max_tokens=40))
    world.steps_until_first_token("other")
    while world.outcomes["long"].finish_reason is None and world.outcomes["other"].finish_reason is None:
        before = len(world.outcomes["other"].token_ids)
        world.step()
        assert len(world.outcomes["other"].token_ids) == before + 1
    assert len(world.outcomes["long"].token_ids) > 30
    world.run()


class FailingDecoder(LetterDecoder):
    """Decoder that fails at one of its tokens."""

    def __init__(self, num_sound: int) -> None:
        super().__init__()
        self._num_sound = num_sound

    def push(self, token_id: int) -> str:
        self._num_sound -= 1
        if self._num_sound < 0:
            raise ValueError("no text")
        return super().push(token_id)


@pytest.mark.parametrize("num_sound", range(12))
def test_a_sampled_or_forced_token_without_text_fails_its_sequence_alone(
    num_sound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shadow_runner, "decoders", lambda asked: FailingDecoder(num_sound) if asked.params.grammar else LetterDecoder()
    )
    world = World(config())
    world.run(request("good", max_tokens=20), request("bad", (1, 2, 3, 4), max_tokens=20, grammar="2 99"))
    good, bad = world.outcomes["good"], world.outcomes["bad"]
    assert tuple(good.token_ids) == continuation((1, 2, 3), 20)
    assert bad.last is not None and isinstance(bad.last.error, SequenceFailed)
    assert max(0, num_sound - 3) <= len(bad.token_ids) <= num_sound
    metrics = {metric.name: metric.value for metric in world.engine.metrics().metrics}
    assert metrics["vllm:generation_tokens"] == len(good.token_ids) + len(bad.token_ids)


def test_a_stop_string_in_a_forced_text_ends_it() -> None:
    world, asked = forced_world()
    world.run(asked)
    text = world.outcomes["forced"].text
    world, asked = forced_world(stop=(text[4:6],))
    world.run(asked)
    stopped = world.outcomes["forced"]
    assert stopped.finish_reason is FinishReason.STOP and stopped.text == text[: text.index(text[4:6])]


def delta(rng: random.Random, start: int, last: bool = False) -> TokenDelta:
    token_ids = tuple(rng.randrange(9) for _ in range(rng.randint(0, 3)))
    reason = FinishReason.STOP if last else None
    return TokenDelta("r", start, token_ids, "".join(map(str, token_ids)), Usage(3, start, 0), finish_reason=reason)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(50))
def test_merging_is_associative(seed: int) -> None:
    rng = random.Random(seed)
    a = delta(rng, 0)
    b = delta(rng, len(a.token_ids))
    c = delta(rng, b.start + len(b.token_ids), last=True)
    assert merge([merge([a, b]), c]) == merge([a, merge([b, c])]) == merge([a, b, c])
