"""Limits of less urgent work in a step: less urgent bands compute less while a more urgent band's streams are slow."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from replicas.engine.batch import BatchColumns, CollectedStep
from replicas.engine.config import EngineConfig
from replicas.engine.sequence import BAND, DECODES, EFFECTIVE_BAND, HELD_STEPS, LAST_TOKEN_S, Sequence
from replicas.engine.sequence_table import Lag, SequenceTable
from replicas.protocol import BANDS, Band

_WINDOW_STEPS = 8
_DECREASE, _LARGEST_DECREASE, _FAR = 0.75, 0.125, 1.5
_INCREASES_TO_ALL_SLOTS, _INCREASE = 32, 0.0625
_FLOOR, _PREFILL_FLOOR = 1.5, 1.2
_PREFILL_SHARE = 0.25
_REFERENCE_PERIOD_STEPS = 32
_NUM_REFERENCES = 9
_MAX_EXCESS, _MAX_CREDIT = 16, 1


@dataclass(slots=True)
class _Window:
    """Some steps."""

    num_steps: int = 0
    gaps_s: list[np.ndarray] = field(default_factory=list)
    """Gaps of the band's streams after each step, seconds, float64."""
    most_less_urgent: int = 0
    """Most less urgent tokens in a step."""
    has_decodes: bool = False
    """True if a step had less urgent decodes, and not prompts alone."""


class TpotController:
    """Controller of the less urgent tokens in a step, which keeps the TPOT of one band near its target.

    A token is that of a decode, or one of a prompt. Additive increase, multiplicative decrease (Chiu and Jain,
    "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in Computer Networks", 1989):

    1. A window is 8 steps in which the band decodes beside less urgent work. Its TPOT is the mean gap between two
       tokens of the band's streams. The time by which it exceeds the target is carried over to the next window, up to
       16 times the target: long steps, such as those with a prompt of the band, are made up for by shorter ones. So is
       the time by which it stays below, up to once the target, if there were less urgent decodes: else the mean over
       windows would stay below, too. Steps that exceed the target by all that is carried over end their window at once.
    2. With an excess, the limit becomes three quarters of the less urgent tokens of a step, at least one. If the window
       exceeded the target by half, it becomes their number at which a line from the reference steps to the window
       meets the target, if that is less, but at least an eighth: a stream need not wait for several windows.
    3. Otherwise, if a step had as many as the limit, a 32nd of `max_num_seqs` is added, or a sixteenth of the limit.
    4. The target is never below 1.5 times the gap after a reference step, which has decodes of the band and neither
       prompts nor less urgent work: to hold decodes cannot make the streams faster than that. Steps without less urgent
       work are such. If there is none, and the last window was above the target, one step in 32 is made one.
    5. In a window without less urgent decodes it is 1.2 times: prompts come and go, and each gap must be near the
       others. The median gap stands for the mean, as for reference steps: a target so near must not be missed for a few
       slow steps. Such a window ends with its second step if both exceed the target by half.

    Steps of few less urgent decodes give more of their tokens a second than full steps now and then, at the same TPOT:
    on a CPU the duration of a step grows faster than its number of sequences.

    Invariant: 1 <= limit <= max_num_batched_tokens.
    """

    def __init__(self, target_s: float, config: EngineConfig) -> None:
        """`target_s` is in seconds; 0: as low as the rules allow."""
        self._target_s = target_s
        self._least_increase = config.num_slots / _INCREASES_TO_ALL_SLOTS
        self._max_limit = config.max_num_batched_tokens
        self._limit = float(self._max_limit)
        self._is_late = target_s == 0.0
        self._references_s: deque[float] = deque(maxlen=_NUM_REFERENCES)
        self._num_unreferenced_steps = _REFERENCE_PERIOD_STEPS
        self._excess_s = 0.0
        self._window = _Window()

    @property
    def limit(self) -> int:
        """Most less urgent tokens in a step."""
        return int(self._limit)

    @property
    def target_s(self) -> float:
        """Present target beside less urgent decodes, seconds; infinite if there is no number and no reference yet."""
        return self._target_above(_FLOOR)

    @property
    def _reference_s(self) -> float:
        """Median gap after a reference step, seconds; 0: there was none yet."""
        references_s = sorted(self._references_s)
        return references_s[len(references_s) // 2] if references_s else 0.0

    def _target_above(self, floor: float) -> float:
        return max(self._target_s, floor * self._reference_s) or math.inf

    def begin_step(self) -> bool:
        """Count a step with less urgent work; return True if it must be a reference step."""
        self._num_unreferenced_steps += 1
        is_reference = self._is_late and self._num_unreferenced_steps >= _REFERENCE_PERIOD_STEPS
        if is_reference:
            self._num_unreferenced_steps = 0
        return is_reference

    def refer(self, gap_s: float) -> None:
        """Note the gap that a stream of the band had after a reference step."""
        self._references_s.append(gap_s)

    def observe(self, gaps_s: np.ndarray, num_less_urgent: int, has_decodes: bool) -> None:
        """Adapt the limit to a step with `num_less_urgent` tokens, after which the band's streams had these gaps.

        `has_decodes`: some of the tokens are those of decodes.
        """
        if math.isinf(self.target_s):
            return  # There was no reference step yet.
        window = self._window
        window.num_steps += 1
        window.gaps_s.append(gaps_s)
        window.most_less_urgent = max(window.most_less_urgent, num_less_urgent)
        window.has_decodes |= has_decodes
        all_gaps_s = np.concatenate(window.gaps_s)
        if window.has_decodes:
            gap_s, target_s, max_credit = float(all_gaps_s.mean()), self.target_s, _MAX_CREDIT
        else:
            middle = (len(all_gaps_s) - 1) // 2
            gap_s = float(np.partition(all_gaps_s, middle)[middle])
            target_s, max_credit = self._target_above(_PREFILL_FLOOR), 0
        excess_s = window.num_steps * (gap_s - target_s)
        is_far = window.num_steps > 1 and not window.has_decodes and gap_s > _FAR * target_s
        if window.num_steps >= _WINDOW_STEPS or is_far or excess_s >= _MAX_EXCESS * target_s:
            self._is_late = gap_s > self._target_s
            self._excess_s = min(max(-max_credit * target_s, self._excess_s + excess_s), _MAX_EXCESS * target_s)
            self._adapt(window.most_less_urgent, gap_s, target_s)
            self._window = _Window()

    def _adapt(self, num_less_urgent: int, gap_s: float, target_s: float) -> None:
        if self._excess_s > 0.0:
            fraction = _DECREASE
            if gap_s > _FAR * target_s:
                on_line = (target_s - self._reference_s) / (gap_s - self._reference_s)
                fraction = min(max(on_line, _LARGEST_DECREASE), _DECREASE)
            self._limit = max(1.0, fraction * min(self._limit, num_less_urgent))
        elif num_less_urgent >= self.limit:
            self._limit = min(self._max_limit, self._limit + max(self._least_increase, _INCREASE * self._limit))


class TpotLimits:
    """Limits of the work of less urgent bands, by a `TpotController` for each band with a TPOT target.

    The decodes of less urgent bands come first in a step, then their prompts, with what the decodes leave of the limit,
    but at least a quarter of it. A held sequence keeps its slot and its blocks, and is not in the step. Those that were
    held for the most steps decode first, then the most urgent. A promoted sequence counts as interactive: it is never
    held, and its prompt is not limited.

    Prompts that must be computed whole are not limited: a model with such ones generates nothing beside them.

    Invariant: while a sequence decodes, it is held in at most `max_held_steps` steps in a row. In each step that is no
    reference step, at least one less urgent sequence decodes, and no other one comes before those held longer; and
    prompts get at least one token. Of 32 steps at most one is a reference step of each band.
    """

    def __init__(self, config: EngineConfig, table: SequenceTable) -> None:
        self._table = table
        self._controllers = {
            band: TpotController(target_s, config)
            for band, target_s in zip(BANDS[:-1], config.tpot_targets_s, strict=False)
            if target_s is not None and not config.whole_prompts
        }
        num_others = _REFERENCE_PERIOD_STEPS - len(self._controllers)
        self.max_held_steps = config.num_slots * _REFERENCE_PERIOD_STEPS // num_others
        """Most steps in a row in which a sequence that decodes is held."""
        # Of the step for which `hold` was called last: tokens that the prompts of a band and of less urgent ones get,
        # and most tokens of the step.
        self._prompt_tokens: dict[Band, int] = {}
        self._num_tokens = config.max_num_batched_tokens
        self._max_num_tokens = config.max_num_batched_tokens

    def targets_s(self) -> tuple[float | None, ...]:
        """Return the present target of each band, seconds; None: no target, or none is known yet."""
        targets_s = [self._controllers[band].target_s if band in self._controllers else math.inf for band in BANDS]
        return tuple(target_s if target_s < math.inf else None for target_s in targets_s)

    def hold(self, running: list[Sequence], lag: Lag, least_urgent: Band) -> list[int]:
        """Return the decodes that the next step leaves out, as indices of `running`, and count the step for them.

        `running` is by urgency, and `lag` is what it misses. `least_urgent` is the least urgent band with work.
        """
        self._prompt_tokens.clear()
        self._num_tokens = self._max_num_tokens
        if not self._controllers or not running or running[0].effective_band >= least_urgent:
            return []  # The usual case.
        decodes = lag.is_decoding.nonzero()[0]
        numbers = self._table.numbers.take(lag.rows[decodes], axis=1)
        held = np.zeros(len(decodes), bool)
        for band, controller in self._controllers.items():
            if band >= least_urgent or not np.count_nonzero((numbers[BAND] == band) & ~held):
                continue
            others = ((numbers[EFFECTIVE_BAND] > band) & ~held).nonzero()[0]
            others = others[np.argsort(-numbers[HELD_STEPS, others], kind="stable")]
            num_decodes = self._limit_prompts(band, controller, len(others))
            held[others[num_decodes:]] = True
        self._table.numbers[HELD_STEPS, lag.rows[decodes[held]]] += 1
        return [int(index) for index in decodes[held]]

    def _limit_prompts(self, band: Band, controller: TpotController, num_decodes: int) -> int:
        """Note the limit of the prompts less urgent than `band`; return that of the decodes, of which so many wait."""
        if controller.begin_step():
            self._prompt_tokens[BANDS[band + 1]] = 0
            return 0
        limit = controller.limit
        self._prompt_tokens[BANDS[band + 1]] = max(limit - num_decodes, math.ceil(_PREFILL_SHARE * limit))
        return limit

    def num_tokens(self, band: Band, num_scheduled: int) -> int:
        """Return the most tokens of the step with prompts of `band`, when it has `num_scheduled` without them.

        Called after `hold` for each band in turn, most urgent first.
        """
        if band in self._prompt_tokens:
            self._num_tokens = min(self._num_tokens, num_scheduled + self._prompt_tokens[band])
        return self._num_tokens

    def stepped(self, step: CollectedStep) -> None:
        """Adapt the limits to a step. Called before its tokens are applied."""
        batch, columns = step.batch, step.batch.columns
        streaming = [band for band in self._controllers if band in batch.decoding_bands]
        if not streaming:
            return
        numbers, last_token_s = self._numbers(columns)
        is_decode = numbers[DECODES] > 0
        has_decodes_alone = batch.num_tokens == np.count_nonzero(is_decode)
        for band in streaming:
            controller = self._controllers[band]
            gaps_s = step.collected_s - last_token_s[is_decode & (numbers[BAND] == band)]
            is_less_urgent = numbers[EFFECTIVE_BAND] > band
            num_less_urgent = int(columns.num_tokens[is_less_urgent].sum())
            if len(gaps_s) and num_less_urgent:
                controller.observe(gaps_s, num_less_urgent, bool(np.any(is_less_urgent & is_decode)))
            elif len(gaps_s) and has_decodes_alone:
                controller.refer(float(gaps_s[0]))

    def _numbers(self, columns: BatchColumns) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of a step's sequences, and the times of their last tokens, in order of the items."""
        table, rows = self._table, columns.rows
        numbers, last_token_s = table.numbers.take(rows, axis=1), table.times[LAST_TOKEN_S, rows]
        for index in (~table.has(columns)).nonzero()[0].tolist():
            # It was preempted or ended while the step was in flight.
            sequence = columns.sequences[index]
            numbers[:, index], last_token_s[index] = sequence.numbers, sequence.times[LAST_TOKEN_S]
        return numbers, last_token_s
