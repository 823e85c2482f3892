"""Batch of one step, the step's results, and the interfaces of the engine to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from replicas.engine.sequence import Sequence
from replicas.protocol import Band, GenerateRequest, PositionLogprobs


@dataclass(frozen=True, slots=True)
class StateMove:
    """State slots of one item. Slot 0 is scratch. An item that begins at position 0 begins with an empty state."""

    source: int = 0
    """Slot with the state before the item's first token."""
    target: int = 0
    """Slot that gets the state at the last boundary before the item's end, and the tail of the tokens since."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """Boundaries within the item whose state is also written, each with its slot."""


SCRATCH_STATE = StateMove()
"""Slots of an item of a model without recurrent state, and of dummy items."""


class StateColumns(NamedTuple):
    """State slots of the items of a step, see `StateMove`."""

    sources: np.ndarray
    targets: np.ndarray
    snapshots: dict[int, tuple[tuple[int, int], ...]]
    """Snapshots of the items that have some, by their indices."""

    @classmethod
    def of(cls, moves: Items[StateMove]) -> StateColumns:
        """Return the columns of `moves`."""
        return cls(
            np.array([move.source for move in moves], np.int64),
            np.array([move.target for move in moves], np.int64),
            {index: move.snapshots for index, move in enumerate(moves) if move.snapshots},
        )

    def take(self, indices: np.ndarray) -> StateColumns:
        """Return the items at `indices`."""
        snapshots = {}
        if self.snapshots:
            places = enumerate(indices.tolist())
            snapshots = {place: self.snapshots[index] for place, index in places if index in self.snapshots}
        return StateColumns(self.sources[indices], self.targets[indices], snapshots)

    def words(self) -> np.ndarray:
        """Return each item's two slots, [2 * num_items] int64."""
        words: np.ndarray = np.stack([self.sources, self.targets], axis=1).ravel()
        return words

    def move(self, index: int) -> StateMove:
        """Return the slots of one item."""
        return StateMove(self.sources.item(index), self.targets.item(index), self.snapshots.get(index, ()))


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens that one sequence computes in this step: positions [start, start + num_tokens).

    The sequence's block table already has a block for every position. The last token may be a placeholder: the previous
    step samples it, and the runner takes its value on the device.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """True if the step reaches the last known token or placeholder, and so samples the next one from its logits."""
    num_recomputed_tokens: int
    """Number of the tokens that were computed before, and lost to a preemption."""
    preemption: int
    """`num_preemptions` of the sequence at scheduling time. If it differs later, the sequence was preempted and no
    longer owns these blocks."""
    state: StateMove = SCRATCH_STATE

    @classmethod
    def of(cls, sequence: Sequence, start: int, num_tokens: int, state: StateMove = SCRATCH_STATE) -> ScheduledSequence:
        """Return the item with the present facts of the sequence, which changes while the step is in flight."""
        end, num_lost = start + num_tokens, sequence.num_preempted_tokens
        num_recomputed_tokens = min(end, num_lost) - start if num_lost > start else 0
        samples = sequence.may_sample_at(end)
        return cls(sequence, start, num_tokens, samples, num_recomputed_tokens, sequence.num_preemptions, state)

    @property
    def end(self) -> int:
        """Position after the last computed one."""
        return self.start + self.num_tokens

    @property
    def output_index(self) -> int:
        """Index, from 0, of the output token that the item samples."""
        return self.end - self.sequence.num_prompt_tokens

    @property
    def holds_blocks(self) -> bool:
        """True if the sequence still owns the blocks that the step writes."""
        return bool(self.sequence.block_table) and self.sequence.num_preemptions == self.preemption

    def part(self, start: int, num_tokens: int) -> ScheduledSequence:
        """Return the part with positions [start, start + num_tokens); only the part at the end samples.

        Parts run in their order: a later one continues from the state that the one before has left.
        """
        source = self.state.source if start == self.start else self.state.target
        end = start + num_tokens
        snapshots = tuple(snapshot for snapshot in self.state.snapshots if start < snapshot[0] <= end)
        part = ScheduledSequence.of(self.sequence, start, num_tokens, StateMove(source, self.state.target, snapshots))
        return replace(part, samples=self.samples and part.end == self.end)


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """Items of a step as arrays, in their order. They stay as they were scheduled, while the sequences go on."""

    sequences: list[Sequence]
    rows: np.ndarray
    """Columns of the sequences in the table of the running ones, all distinct. Those that do not run have free ones.

    Steps with one and the same array have the same sequences, with the same admissions."""
    admissions: np.ndarray
    """Numbers of the sequences' admissions; -1: the sequence does not run."""
    starts: np.ndarray
    num_tokens: np.ndarray
    samples: np.ndarray
    newest_tokens: np.ndarray
    """Last token of each item that samples; -1 if it is a placeholder."""
    num_recomputed_tokens: np.ndarray
    preemptions: np.ndarray
    num_table_blocks: np.ndarray
    """Number of blocks in the first table of each sequence."""
    newest_blocks: np.ndarray
    """Last block that came to each of these tables."""
    num_all_tokens: int
    """Number of tokens of all items."""
    num_decodes: int
    """Number of the first items whose sequences have been in earlier steps, and miss their newest tokens alone."""
    special: list[int]
    """Items whose sequences ask for more than text by temperature, top-p, top-k and min-p."""
    states: StateColumns | None = None
    """State slots of the items; None: the model has no recurrent state."""

    @classmethod
    def of(cls, items: Items[ScheduledSequence]) -> BatchColumns:
        """Return the columns of `items`."""
        sequences = [item.sequence for item in items]
        taken = {sequence.row for sequence in sequences}
        free = iter([row for row in range(2 * len(items)) if row not in taken])
        places = [(next(free), -1) if s.row is None else (s.row, s.admission) for s in sequences]
        return cls(
            sequences,
            np.array([row for row, _ in places], np.int64),
            np.array([admission for _, admission in places], np.int64),
            np.array([item.start for item in items], np.int64),
            np.array([item.num_tokens for item in items], np.int64),
            np.array([item.samples for item in items], bool),
            np.array([_last_token(item) for item in items], np.int64),
            np.array([item.num_recomputed_tokens for item in items], np.int64),
            np.array([item.preemption for item in items], np.int64),
            np.array([len(sequence.block_table) for sequence in sequences], np.int64),
            np.array([sequence.block_table[-1] if sequence.block_table else 0 for sequence in sequences], np.int64),
            sum(item.num_tokens for item in items),
            0,
            [index for index, sequence in enumerate(sequences) if sequence.is_special],
            StateColumns.of([item.state for item in items]),
        )

    @property
    def ends(self) -> np.ndarray:
        """Positions after the items' last ones."""
        ends: np.ndarray = self.starts + self.num_tokens
        return ends

    def take(self, indices: Items[int] | np.ndarray) -> BatchColumns:
        """Return the items at `indices`, those that decode first."""
        taken = np.asarray(indices, np.int64)
        sequences = [self.sequences[index] for index in taken.tolist()]
        num_tokens = self.num_tokens[taken]
        return BatchColumns(
            sequences,
            self.rows[taken],
            self.admissions[taken],
            self.starts[taken],
            num_tokens,
            self.samples[taken],
            self.newest_tokens[taken],
            self.num_recomputed_tokens[taken],
            self.preemptions[taken],
            self.num_table_blocks[taken],
            self.newest_blocks[taken],
            int(num_tokens.sum()),
            int(np.count_nonzero(taken < self.num_decodes)),
            [index for index, sequence in enumerate(sequences) if sequence.is_special] if self.special else [],
            None if self.states is None else self.states.take(taken),
        )

    def item(self, index: int) -> ScheduledSequence:
        """Return one item."""
        return ScheduledSequence(
            self.sequences[index],
            self.starts.item(index),
            self.num_tokens.item(index),
            self.samples.item(index),
            self.num_recomputed_tokens.item(index),
            self.preemptions.item(index),
            SCRATCH_STATE if self.states is None else self.states.move(index),
        )


def _last_token(item: ScheduledSequence) -> int:
    sequence = item.sequence
    return sequence.token_ids[item.end - 1] if item.end <= sequence.num_known_tokens else -1


class ScheduledBatch:
    """Sequences of one step, each at most once: first those that decode, then those that prefill.

    It is made of items or of columns; each is made of the other when it is read first.
    """

    def __init__(
        self,
        items: tuple[ScheduledSequence, ...] = (),
        decoding_bands: tuple[Band, ...] = (),
        columns: BatchColumns | None = None,
    ) -> None:
        self._items = items
        self._columns = columns
        self.decoding_bands = decoding_bands
        """Bands of the requests that decode, most urgent first; one is listed twice if a promoted request is in it."""

    def __len__(self) -> int:
        return len(self._items) if self._columns is None else len(self._columns.sequences)

    @property
    def columns(self) -> BatchColumns:
        """Items as arrays."""
        if self._columns is None:
            self._columns = BatchColumns.of(self._items)
        return self._columns

    @property
    def items(self) -> tuple[ScheduledSequence, ...]:
        """Items as objects."""
        if self._columns is not None and not self._items:
            self._items = tuple(map(self._columns.item, range(len(self._columns.sequences))))
        return self._items

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed in this step."""
        return self.columns.num_all_tokens

    @property
    def is_constrained(self) -> bool:
        """True if the next token of some item is constrained, and so depends on the tokens before it."""
        samples, sequences = self.columns.samples, self.columns.sequences
        return any(samples[index] and sequences[index].constraint is not None for index in self.columns.special)

    def needs_sync(self, counts_on_device: bool) -> bool:
        """Return True if the host must know a token sampled here before the next step.

        Bad words of several tokens need it, and so do penalties unless the device counts the tokens.
        """
        samples, sequences = self.columns.samples, self.columns.sequences
        return any(
            samples[index]
            and (sequences[index].has_bad_phrases or (sequences[index].has_penalties and not counts_on_device))
            for index in self.columns.special
        )


@dataclass(frozen=True, slots=True)
class ItemResult:
    """Result of a step for one scheduled sequence."""

    token_id: int | None = None
    """Sampled token; None if the item does not sample or failed."""
    logprobs: PositionLogprobs | None = None
    """Log probabilities at the sampled token, if the request asked for them."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """Log probabilities, if asked for, of the prompt tokens at start + 1 .. min(end, num_prompt_tokens - 1)."""
    pooled: np.ndarray | None = None
    """Sum of the hidden states of the item's tokens that its request pools, [hidden_size] float32; None: no token."""
    error: str | None = None
    """Error of this sequence alone, for example logits that are not numbers; None: it did not fail."""


class StepResults:
    """Results of a step, one for each item, in order: the sampled tokens in an array, all else by item."""

    def __init__(self, token_ids: np.ndarray, others: dict[int, ItemResult]) -> None:
        """`token_ids` [num_items] int64 has -1 for items without a token; `others` are results with more than one."""
        self.token_ids = token_ids
        self.others = others

    @classmethod
    def of(cls, results: Items[ItemResult]) -> StepResults:
        """Return the results of all items."""
        token_ids = [-1 if result.token_id is None else result.token_id for result in results]
        others = {
            index: result
            for index, result in enumerate(results)
            if result.error is not None
            or result.logprobs is not None
            or result.prompt_logprobs
            or result.pooled is not None
        }
        return cls(np.array(token_ids, np.int64), others)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: int) -> ItemResult:
        other = self.others.get(index)
        if other is not None:
            return other
        token_id = self.token_ids.item(index)
        return _NO_RESULT if token_id < 0 else ItemResult(token_id)

    def __iter__(self) -> Iterator[ItemResult]:
        return map(self.__getitem__, range(len(self.token_ids)))


_NO_RESULT = ItemResult()


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Step to launch: its batch, and facts from its scheduling."""

    batch: ScheduledBatch
    begun_s: float
    """Monotonic time at which the scheduling of the step began."""
    is_saturated: bool
    """True if the step has as much work as the engine's limits allow."""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """Step with known results."""

    batch: ScheduledBatch
    computed: ScheduledBatch
    """Items with results. A repeated step has none for sequences that were preempted or have ended since."""
    results: StepResults
    """Results of the items of `computed`."""
    collected_s: float
    """Monotonic time at which the results became known."""
    duration_s: float
    """Seconds since the step's scheduling began, or since the previous step was collected if later: steps overlap."""
    is_saturated: bool


class LaunchedStep(Protocol):
    """Step that the device is computing or has computed."""

    def sample(self) -> None:
        """Launch the sampling that depends on the tokens of earlier steps: that of constrained sequences.

        Called once, after the results of all earlier steps have been applied, while the device computes the step.

        Raises:
            Exception: the batch failed; steps launched before are not affected.
        """

    def collect(self) -> StepResults:
        """Wait for the step and return one result per item, in order.

        Called once, after `sample`, in the order of the launches.

        Raises:
            Exception: the whole batch failed; the results of this step and of all launched after it are invalid.
        """


class ModelRunner(Protocol):
    """Runner of a model on a device; the only object that knows the device."""

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Begin to compute all scheduled tokens, write their KV, and sample for the items that sample.

        If the batch is constrained, the sampling is left to the launched step's `sample`.

        Steps take effect in the order of their launches. The last token of an item may be the one that the previous
        step samples, even if that step has not been collected. Running an item again writes the same KV.

        Raises:
            Exception: the batch failed; steps launched before are not affected.
        """


class Pooler(Protocol):
    """Maker of one sequence's pooled output."""

    def push(self, start: int, pooled: np.ndarray) -> None:
        """Add the result of the tokens from position `start`; a result from position 0 begins anew."""

    def finish(self) -> bytes:
        """Return the output in float32, little-endian. Called when the whole prompt is computed.

        Raises:
            SequenceFailed: it is not finite.
        """


PoolerFactory = Callable[[GenerateRequest], Pooler]


class IncrementalDecoder(Protocol):
    """Decoder of one sequence's output tokens, one at a time."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty in the middle of a character, and for a special token."""

    def finish(self) -> str:
        """Return the text of an incomplete character at the end. Called once, when no token follows."""
