"""Limits of the decodes in a step: less urgent bands decode less while a more urgent band's streams are too slow."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from replicas.engine.batch import BatchColumns, CollectedStep
from replicas.engine.config import EngineConfig
from replicas.engine.sequence import BAND, DECODES, EFFECTIVE_BAND, HELD_STEPS, LAST_TOKEN_S, Sequence
from replicas.engine.sequence_table import Lag, SequenceTable
from replicas.protocol import BANDS

_WINDOW_STEPS = 8
_DECREASE, _FIRST_DECREASE = 0.75, 0.25
_INCREASES_TO_FULL = 32
_FLOOR = 1.5
_REFERENCE_PERIOD_STEPS = 32
_NUM_REFERENCES = 5
_MAX_EXCESS, _MAX_CREDIT = 16, 1


@dataclass(slots=True)
class _Window:
    """Sums over some steps."""

    num_steps: int = 0
    num_gaps: int = 0
    gap_s: float = 0.0
    most_less_urgent: int = 0
    """Most less urgent decodes in a step."""
    has_held: bool = False
    """True if a step left out some decode."""


class TpotController:
    """Controller of the number of less urgent decodes in a step, which keeps the TPOT of one band near its target.

    Additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for
    Congestion Avoidance in Computer Networks", 1989):

    1. A window is 8 steps in which the band decodes beside less urgent decodes, held or not. Its TPOT is the mean gap
       between two tokens of the band's streams. The time by which it exceeds the target is carried over to the next
       window, up to 16 times the target: long steps, such as those with a prompt, are made up for by shorter ones. So
       is the time by which it stays below, up to once the target: else the mean over windows would stay below, too.
    2. With an excess, the limit becomes three quarters of the less urgent decodes of a step, at least one. From
       `max_num_seqs` it becomes their number at which a line from the reference steps to the window meets the target,
       if that is less, but at least a quarter: the first stream need not wait for several windows.
    3. Otherwise, if some decode was held, a 32nd of `max_num_seqs` is added.
    4. The target is never below 1.5 times the gap after a reference step, which has decodes of the band and neither
       prompts nor less urgent decodes: to hold decodes cannot make the streams faster than that. Steps without less
       urgent work are such. If there is none, and the last window was above the target, one step in 32 is made one.

    Steps of few less urgent decodes give more of their tokens a second than full steps now and then, at the same TPOT:
    on a CPU the duration of a step grows faster than its number of sequences.

    Invariant: 1 <= limit <= max_num_seqs.
    """

    def __init__(self, target_s: float, max_num_seqs: int) -> None:
        """`target_s` is in seconds; 0: 1.5 times the gap after a reference step alone."""
        self._target_s = target_s
        self._max_limit = max_num_seqs
        self._limit = float(max_num_seqs)
        self._is_late = target_s == 0.0
        self._references_s: deque[float] = deque(maxlen=_NUM_REFERENCES)
        self._num_unreferenced_steps = _REFERENCE_PERIOD_STEPS
        self._excess_s = 0.0
        self._window = _Window()

    @property
    def limit(self) -> int:
        """Most less urgent decodes in a step."""
        return int(self._limit)

    @property
    def target_s(self) -> float:
        """Present target, seconds; infinite if there is no number and no step has shown one yet."""
        return max(self._target_s, _FLOOR * self._reference_s) or math.inf

    @property
    def _reference_s(self) -> float:
        """Median gap after a reference step, seconds; 0: there was none yet."""
        references_s = sorted(self._references_s)
        return references_s[len(references_s) // 2] if references_s else 0.0

    def begin_step(self) -> bool:
        """Count a step with less urgent decodes; return True if it must be a reference step."""
        self._num_unreferenced_steps += 1
        is_reference = self._is_late and self._num_unreferenced_steps >= _REFERENCE_PERIOD_STEPS
        if is_reference:
            self._num_unreferenced_steps = 0
        return is_reference

    def refer(self, gap_s: float) -> None:
        """Note the gap that a stream of the band had after a reference step."""
        self._references_s.append(gap_s)

    def observe(self, gaps_s: list[float], num_less_urgent: int, num_held: int) -> None:
        """Adapt the limit to a step beside less urgent decodes, after which the band's streams had these gaps."""
        window = self._window
        window.num_steps += 1
        window.num_gaps += len(gaps_s)
        window.gap_s += sum(gaps_s)
        window.most_less_urgent = max(window.most_less_urgent, num_less_urgent)
        window.has_held |= num_held > 0
        if window.num_steps >= _WINDOW_STEPS and window.num_gaps > 0:
            self._adapt(window)
            self._window = _Window()

    def _adapt(self, window: _Window) -> None:
        mean_s, target_s = window.gap_s / window.num_gaps, self.target_s
        self._is_late = mean_s > self._target_s
        excess_s = self._excess_s + _WINDOW_STEPS * (mean_s - target_s)
        self._excess_s = min(max(-_MAX_CREDIT * target_s, excess_s), _MAX_EXCESS * target_s)
        if self._excess_s > 0.0:
            fraction = _DECREASE
            if self._limit == self._max_limit:
                on_line = (target_s - self._reference_s) / (max(mean_s, target_s) - self._reference_s)
                fraction = min(max(on_line, _FIRST_DECREASE), _DECREASE)
            self._limit = max(1.0, fraction * min(self._limit, window.most_less_urgent))
        elif window.has_held:
            self._limit = min(self._max_limit, self._limit + self._max_limit / _INCREASES_TO_FULL)


class DecodeLimits:
    """Limits of the decodes of less urgent bands, by a `TpotController` for each band with a TPOT target.

    A held sequence keeps its slot and its blocks, and is not in the step. Those that were held for the most steps
    decode first, then the most urgent. A promoted sequence counts as interactive and is never held.

    Invariant: while a sequence decodes, it is held in at most `max_held_steps` steps in a row. In each step that is no
    reference step, at least one less urgent sequence decodes, and no other one comes before those held longer. Of 32
    steps at most one is a reference step of each band.
    """

    def __init__(self, config: EngineConfig, table: SequenceTable) -> None:
        self._table = table
        self._controllers = {
            band: TpotController(target_s, config.num_slots)
            for band, target_s in zip(BANDS[:-1], config.tpot_targets_s, strict=False)
            if target_s is not None
        }
        num_others = _REFERENCE_PERIOD_STEPS - len(self._controllers)
        self.max_held_steps = config.num_slots * _REFERENCE_PERIOD_STEPS // num_others
        """Most steps in a row in which a sequence that decodes is held."""
        self.least_urgent_band = BANDS[-1]
        """Least urgent band with decodes or prompts in the step for which `hold` was called last."""

    def targets_s(self) -> tuple[float | None, ...]:
        """Return the present target of each band, seconds; None: no target, or none is known yet."""
        targets_s = [self._controllers[band].target_s if band in self._controllers else math.inf for band in BANDS]
        return tuple(target_s if target_s < math.inf else None for target_s in targets_s)

    def hold(self, running: list[Sequence], lag: Lag) -> list[int]:
        """Return the decodes that the next step leaves out, as indices of `running`, and count the step for them.

        `running` is by urgency, and `lag` is what it misses.
        """
        self.least_urgent_band = BANDS[-1]
        if not self._controllers or not running or running[0].effective_band is running[-1].effective_band:
            return []  # The usual case.
        decodes = lag.is_decoding.nonzero()[0]
        numbers = self._table.numbers.take(lag.rows[decodes], axis=1)
        held = np.zeros(len(decodes), bool)
        for band, controller in self._controllers.items():
            if not np.count_nonzero((numbers[BAND] == band) & ~held):
                continue
            others = ((numbers[EFFECTIVE_BAND] > band) & ~held).nonzero()[0]
            if len(others):
                others = others[np.argsort(-numbers[HELD_STEPS, others], kind="stable")]
                if controller.begin_step():
                    self.least_urgent_band = min(self.least_urgent_band, band)
                    held[others] = True
                held[others[controller.limit :]] = True
        self._table.numbers[HELD_STEPS, lag.rows[decodes[held]]] += 1
        return [int(index) for index in decodes[held]]

    def stepped(self, step: CollectedStep) -> None:
        """Adapt the limits to a step. Called before its tokens are applied."""
        batch = step.batch
        if not self._controllers or not batch.decoding_bands:
            return
        if len(batch.decoding_bands) == 1 and not batch.num_held:  # The usual case.
            controller = self._controllers.get(batch.decoding_bands[0])
            if controller is not None and batch.num_tokens == len(batch):
                controller.refer(_gap_s(step, batch.columns.sequences[0]))
            return
        numbers, last_token_s = self._decodes(batch.columns)
        for band, controller in self._controllers.items():
            gaps_s = (step.collected_s - last_token_s[numbers[BAND] == band]).tolist()
            num_less_urgent = int(np.count_nonzero(numbers[EFFECTIVE_BAND] > band))
            if gaps_s and not num_less_urgent and batch.num_tokens == numbers.shape[1]:
                controller.refer(gaps_s[0])
            if num_less_urgent or batch.num_held:
                controller.observe(gaps_s, num_less_urgent, batch.num_held)

    def _decodes(self, columns: BatchColumns) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of a step's decodes, and the times of their last tokens, in order of the items."""
        table, rows = self._table, columns.rows
        numbers, last_token_s = table.numbers.take(rows, axis=1), table.times[LAST_TOKEN_S, rows]
        for index in (~table.has(columns)).nonzero()[0].tolist():
            # It was preempted or ended while the step was in flight.
            sequence = columns.sequences[index]
            numbers[:, index], last_token_s[index] = sequence.numbers, sequence.times[LAST_TOKEN_S]
        is_decode = numbers[DECODES] > 0
        return numbers[:, is_decode], last_token_s[is_decode]


def _gap_s(step: CollectedStep, sequence: Sequence) -> float:
    """Return the time between the token of a step and the one before it, seconds."""
    return step.collected_s - (sequence.last_token_s or 0.0)
