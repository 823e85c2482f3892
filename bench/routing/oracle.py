"""Simulated oracle of a trace: the same replicas, with every length known beforehand.

1. Requests wait in one queue, most urgent band first, then in order of arrival. A request is placed only when a
   replica has a free slot (late binding).
2. It goes to the replica with a free slot and the least work left: prompt and *true* output tokens.
3. Each replica steps like the engine: one token for each running sequence, prompts in chunks, within the token
   budget. A step takes the time that `StepTimes` gives.

HTTP, Ray and processes cost nothing here; experiments add their measured cost.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from testkit.engine.timed_runner import StepShape, StepTimes


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the trace."""

    at_s: float
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class _Running:
    index: int
    prompt_left: int
    output_left: int
    num_tokens: int


@dataclass(slots=True)
class _Replica:
    running: list[_Running] = field(default_factory=list)
    is_stepping: bool = False

    @property
    def tokens_left(self) -> int:
        return sum(sequence.prompt_left + sequence.output_left for sequence in self.running)


@dataclass(frozen=True, slots=True)
class OracleRun:
    """Result of the simulation."""

    ttft_s: list[float]
    """Time to first token of each arrival, in their order."""
    gap_s: float
    """Median time between two tokens of a sequence; 0 if no sequence has two."""


def run_oracle(
    arrivals: Sequence[Arrival], step_times: StepTimes, num_replicas: int, num_slots: int, budget: int
) -> OracleRun:
    """Simulate the arrivals, without shared prefixes."""
    events = [(arrival.at_s, 1, index) for index, arrival in enumerate(arrivals)]
    replicas = [_Replica() for _ in range(num_replicas)]
    return _Simulation(arrivals, step_times, num_slots, budget, replicas, events).run()


@dataclass(slots=True)
class _Simulation:
    arrivals: Sequence[Arrival]
    step_times: StepTimes
    num_slots: int
    budget: int
    replicas: list[_Replica]
    events: list[tuple[float, int, int]]
    """(time, kind, index): kind 0 is the end of a replica's step, kind 1 an arrival."""
    waiting: list[tuple[int, float, int]] = field(default_factory=list)
    first_token_s: dict[int, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)

    def run(self) -> OracleRun:
        heapq.heapify(self.events)
        while self.events:
            now, kind, what = heapq.heappop(self.events)
            if kind == 1:
                heapq.heappush(self.waiting, (self.arrivals[what].priority, self.arrivals[what].at_s, what))
            else:
                self._end_step(self.replicas[what], now)
            self._place()
            self._start_steps(now)
        ttft_s = [self.first_token_s[index] - arrival.at_s for index, arrival in enumerate(self.arrivals)]
        return OracleRun(ttft_s, statistics.median(self.gaps_s) if self.gaps_s else 0.0)

    def _place(self) -> None:
        while self.waiting:
            free = [replica for replica in self.replicas if len(replica.running) < self.num_slots]
            if not free:
                return
            *_, index = heapq.heappop(self.waiting)
            arrival = self.arrivals[index]
            replica = min(free, key=lambda replica: replica.tokens_left)
            replica.running.append(_Running(index, arrival.num_prompt_tokens, arrival.num_output_tokens, 0))

    def _start_steps(self, now: float) -> None:
        for number, replica in enumerate(self.replicas):
            if replica.running and not replica.is_stepping:
                replica.is_stepping = True
                shape = self._plan(replica)
                duration_s = self.step_times.of(shape)
                self.gaps_s += [duration_s] * shape.num_decodes
                heapq.heappush(self.events, (now + duration_s, 0, number))

    def _plan(self, replica: _Replica) -> StepShape:
        """Advance the sequences by one step; return its shape."""
        decoding = [sequence for sequence in replica.running if sequence.prompt_left == 0]
        left = self.budget - len(decoding)
        num_prefill_tokens = 0
        for sequence in decoding:
            sequence.num_tokens += 1
            sequence.output_left -= 1
        for sequence in replica.running:
            if sequence.prompt_left and left:
                num_tokens = min(left, sequence.prompt_left)
                left -= num_tokens
                num_prefill_tokens += num_tokens
                sequence.prompt_left -= num_tokens
                sequence.num_tokens += num_tokens
                if sequence.prompt_left == 0:
                    sequence.output_left -= 1
        context = sum(sequence.num_tokens for sequence in replica.running)
        return StepShape(len(decoding), num_prefill_tokens, context)

    def _end_step(self, replica: _Replica, now: float) -> None:
        replica.is_stepping = False
        for sequence in replica.running:
            if sequence.prompt_left == 0:
                self.first_token_s.setdefault(sequence.index, now)
        replica.running = [s for s in replica.running if s.prompt_left or s.output_left > 0]
