"""Fakes for the engine: a runner that checks every read of the KV cache, a decoder and a manual clock.

A `World` is an engine over these fakes, with the outcome of every request.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from replicas.engine.batch import (
    IncrementalDecoder,
    ItemResult,
    LaunchedStep,
    ScheduledBatch,
    ScheduledSequence,
    StepResults,
)
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.protocol import (
    Band,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    ReplicaIdentity,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from replicas.timing.clock import Clock
from testkit.engine.scripted_constraint import ScriptedCompiler, ScriptedConstraint

IDENTITY = ReplicaIdentity("replica-0", "node-0", 1)
VOCABULARY = 97
_MAX_STEPS = 10_000
PROBE = "probe"
"""Id of the sequence with which the engine checks a device. It has no state slot of its own."""


def prefix_hash(parent: int, token_id: int) -> int:
    """Return a number that identifies all tokens up to and including this one."""
    return hash((parent, token_id))


def next_token(prefix: int) -> int:
    """Return the token after a prefix: the deterministic model."""
    return prefix % VOCABULARY


def continuation(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Return the deterministic model's output after `prompt`, computed without any cache."""
    prefix = 0
    for token_id in prompt:
        prefix = prefix_hash(prefix, token_id)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(next_token(prefix))
        prefix = prefix_hash(prefix, output[-1])
    return tuple(output)


class FakeClock:
    """Monotonic and unix clock that moves only when `now` is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> Clock:
        """Return the clock to hand to the engine."""
        return Clock(monotonic=lambda: self.now, unix=lambda: self.now + 1e9)

    def unix(self, monotonic_s: float) -> float:
        """Return the unix time of a moment of this clock."""
        return monotonic_s + 1e9


class ShadowStates:
    """State slots of a shadow runner: each has the prefix at its boundary, and those of the tokens since."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[int, tuple[int, list[int]]] = {}
        """Boundary of each slot, and the prefixes from there on."""

    def move(self, item: ScheduledSequence, prefixes: list[int]) -> None:
        """Read the item's state and write the next one; `prefixes` are those before each token and after the last."""
        source, target = item.state.source, item.state.target
        assert target > 0, "wrote to the scratch slot"
        first = item.start - item.start % self._block_size
        if item.start > 0:
            boundary, since = self._slots[source]
            assert boundary == first, f"state at {boundary} read for {first}"
            assert since[: item.start - first + 1] == prefixes[first : item.start + 1], "stale state"
        for boundary, slot in (*item.state.snapshots, (item.end - item.end % self._block_size, target)):
            assert slot != source or boundary == first, "overwrote the state that a repetition reads"
            assert item.start < boundary <= item.end or slot == target
            self._slots[slot] = (boundary, prefixes[boundary : item.end + 1])

    def spoil(self, item: ScheduledSequence) -> None:
        """Make invalid what the item has written, apart from the state that it has read."""
        for slot in (item.state.target, *(slot for _, slot in item.state.snapshots)):
            if slot in self._slots:
                boundary, since = self._slots[slot]
                is_read = slot == item.state.source
                self._slots[slot] = (boundary, since[: item.start - boundary + 1]) if is_read else (boundary, [])


class ShadowRunner:
    """Runner that remembers the prefix written to each slot; it fails on a stale read or a write to the scratch block.

    With `has_states` it does the same with the slots of recurrent state.

    `launch` computes at once, as an instant device would; the results are given when they are collected. A token that
    is not collected yet is taken from the step before, as on a real device.

    `fail_on` holds token ids. A batch with one of them among the tokens of a scheduled item raises as a whole, like a
    device that cannot name the sequence at fault.
    """

    def __init__(self, block_size: int, step_s: float = 0.0, clock: FakeClock | None = None) -> None:
        self._block_size = block_size
        self.windows: tuple[int | None, ...] = (None,)
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        self._step_s, self._clock = step_s, clock
        self.has_states = False
        self.states = ShadowStates(block_size)
        self.fail_on: frozenset[int] = frozenset()
        self.batches: list[ScheduledBatch] = []
        self._sampled: dict[Sequence, int] = {}

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        step = ShadowStep(self, batch, self.execute(batch))
        if not batch.is_constrained:
            step.sample()
        return step

    def sampled(self, batch: ScheduledBatch, results: list[ItemResult]) -> None:
        """Keep the tokens of a step on the device, for the next one."""
        self._sampled = {
            item.sequence: result.token_id
            for item, result in zip(batch.items, results, strict=True)
            if result.token_id is not None
        }

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        self.batches.append(batch)
        if self._clock is not None:
            self._clock.now += self._step_s
        for item in batch.items:
            if self.fail_on & set(self._known(item)[item.start :]):
                raise RuntimeError("the device failed")
        return [self._compute(item) for item in batch.items]

    def _known(self, item: ScheduledSequence) -> list[int]:
        """Return the item's tokens and those before it; the last one may come from the step before."""
        known = item.sequence.token_ids[: item.end]
        return known if len(known) == item.end else [*known, self._sampled[item.sequence]]

    def _compute(self, item: ScheduledSequence) -> ItemResult:
        sequence, prefix = item.sequence, 0
        prompt_logprobs, prefixes = [], [0]
        for position, token_id in enumerate(self._known(item)):
            prefix = prefix_hash(prefix, token_id)
            prefixes.append(prefix)
            is_scored = sequence.request.params.prompt_logprobs is not None and item.start <= position
            if is_scored and position + 1 < sequence.num_prompt_tokens:
                following = sequence.token_ids[position + 1]
                prompt_logprobs.append(PositionLogprobs(TokenLogprob(following, -float(position + 1)), ()))
            self._write_and_read(item, position, prefix)
        if self.has_states and sequence.request_id != PROBE:
            self.states.move(item, prefixes)
        sampled = next_token(prefix) if item.samples else None
        return ItemResult(token_id=sampled, prompt_logprobs=tuple(prompt_logprobs))

    def _write_and_read(self, item: ScheduledSequence, position: int, prefix: int) -> None:
        """Write the prefix up to `position`, or read it if an earlier step wrote it, in each table that has it."""
        sequence = item.sequence
        windows = (None,) if sequence.request_id == PROBE else self.windows
        for number, window in enumerate(windows):
            if window is not None and position <= item.start - window:
                continue
            table = (sequence.block_table, *sequence.more_tables)[number]
            slot = (table[position // self._block_size], position % self._block_size)
            assert slot[0] > 0, "used the scratch block"
            if position >= item.start:
                self._slots[slot] = (number, prefix)
            assert self._slots.get(slot) == (number, prefix), f"stale read of {slot} at {position} of {sequence}"


class ShadowStep:
    """Launched step of a shadow runner; `sample` fits the tokens of constrained sequences to their constraints."""

    def __init__(self, runner: ShadowRunner, batch: ScheduledBatch, results: list[ItemResult]) -> None:
        self._runner = runner
        self._batch = batch
        self._results = results
        self._is_sampled = False

    def sample(self) -> None:
        if not self._is_sampled:
            self._results = [self._fitting(*pair) for pair in zip(self._batch.items, self._results, strict=True)]
            self._runner.sampled(self._batch, self._results)
            self._is_sampled = True

    def collect(self) -> StepResults:
        assert self._is_sampled
        return StepResults.of(self._results)

    def _fitting(self, item: ScheduledSequence, result: ItemResult) -> ItemResult:
        sequence, constraint = item.sequence, item.sequence.constraint
        if constraint is None or result.token_id is None or sequence.status is SequenceStatus.FINISHED:
            return result
        assert isinstance(constraint, ScriptedConstraint)
        assert constraint.accepted == sequence.token_ids[sequence.num_prompt_tokens :], "an output token is not known"
        assert sequence.num_placeholder_tokens == item.samples, "the tokens of an earlier step are awaited"
        return replace(result, token_id=fitting(constraint, result.token_id))


def fitting(constraint: ScriptedConstraint, token_id: int) -> int:
    """Return the allowed token that stands for `token_id`."""
    allowed = constraint.allowed()
    return allowed[token_id % len(allowed)]


class LetterDecoder:
    """Decoder that shows one letter for each token; an id divisible by 5 is the first half of a two-token letter."""

    def __init__(self) -> None:
        self._half = False

    def push(self, token_id: int) -> str:
        if token_id % 5 == 0 and not self._half:
            self._half = True
            return ""
        self._half = False
        return chr(ord("a") + token_id % 26)

    def finish(self) -> str:
        return ""


def decoders(_: GenerateRequest) -> IncrementalDecoder:
    return LetterDecoder()


@dataclass
class Outcome:
    """Collected deltas of one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    last: TokenDelta | None = None
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)

    def read(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "a delta after the last"
        assert delta.start == len(self.token_ids)
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason, self.last = delta.finish_reason, delta
        assert (delta.error is not None) == (delta.finish_reason is FinishReason.ERROR)


class World:
    """Engine over a shadow runner, with the outcome of every request."""

    make_engine: type[Engine] = Engine

    def __init__(
        self, config: EngineConfig, step_s: float = 0.0, make_runner: type[ShadowRunner] = ShadowRunner
    ) -> None:
        self.config = config
        self.clock = FakeClock()
        self.runner = make_runner(config.block_size, step_s, self.clock)
        self.runner.has_states = config.num_state_slots > 0
        self.runner.windows = config.windows
        self.engine = self.make_engine(config, self.runner, decoders, IDENTITY, self.clock.clock())
        self.outcomes: dict[str, Outcome] = {}
        self.added_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.constraints: dict[str, ScriptedConstraint] = {}
        self.num_steps = 0

    def add(self, *requests: GenerateRequest) -> None:
        for request in requests:
            constraint = None if request.params.grammar is None else ScriptedCompiler().constraint_of(request)
            self.engine.add(request, constraint)
            self.added_s[request.request_id] = self.clock.now
            if constraint is not None:
                self.constraints[request.request_id] = constraint
            self.outcomes[request.request_id] = Outcome(list(request.output_token_ids))

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            for delta in self.engine.step():
                self.outcomes[delta.request_id].read(delta)
                if delta.finish_reason is not None:
                    self.ended_s[delta.request_id] = self.clock.now
        self.num_steps += num_steps

    def run(self, *requests: GenerateRequest) -> None:
        """Add `requests` and step until no work is left; then check that every block is free."""
        self.add(*requests)
        for _ in range(_MAX_STEPS):
            if not self.engine.has_work:
                break
            self.step()
            self.engine.check_invariants()
        assert not self.engine.has_work, "the engine makes no progress"
        assert self.engine.stats().num_free_blocks == self.config.num_blocks
        assert self.engine.stats().num_free_state_slots == self.config.num_state_slots

    @property
    def num_cut_constraints(self) -> int:
        """Number of times that a constrained item ran again tokens of its output, after a preemption."""
        items = (item for batch in self.runner.batches for item in batch.items if item.sequence.constraint is not None)
        return sum(item.start < item.sequence.num_prompt_tokens < item.end - 1 for item in items)

    def steps_until_first_token(self, request_id: str) -> int:
        for step in range(1, _MAX_STEPS):
            self.step()
            if self.outcomes[request_id].token_ids:
                return step
        raise AssertionError(f"{request_id} got no token in {_MAX_STEPS} steps")


def config(**changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "num_blocks": 64, "block_size": 4, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32,
        "vocab_size": 4096,
    }  # fmt: skip
    return EngineConfig(**{**values, **changes})  # type: ignore[arg-type]


def prompt(num_tokens: int, first: int = 1) -> tuple[int, ...]:
    """Return a prompt of this length whose token ids begin with `first` and repeat after 50."""
    return tuple(first + index % 50 for index in range(num_tokens))


def request(
    request_id: str = "r", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4, band: Band = Band.STANDARD,
    deadline_unix_s: float | None = None, tenant: str = "anonymous", **params: object,
) -> GenerateRequest:  # fmt: skip
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return GenerateRequest(request_id, prompt, sampling, band, tenant, deadline_unix_s=deadline_unix_s)
