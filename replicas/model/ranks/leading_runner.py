"""Runners of several ranks: the first one plans the steps and publishes their messages, the others run these."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from replicas.engine.batch import ScheduledBatch, StepResults
from replicas.model.planner import PlannedStep
from replicas.model.ranks.messages import MessageForm, RankMessage
from replicas.model.ranks.ring import RankLost, RingReader, RingWriter
from replicas.model.runner import RunningStep, TorchModelRunner

_ANSWER_PAUSE_S = 200e-6
_IDLE_S = 1.0


class LeadingRunner:
    """`ModelRunner` of the first rank. Each step is published before it runs, and all ranks run it.

    Every rank samples the same tokens, since logits, or the highest ones of greedy rows, are gathered, and random
    numbers depend on counters alone. A rank with other tokens would write other keys and values from then on.

    A step that could not be planned may be repeated. After a later error the ranks may differ, and every launch fails.
    """

    def __init__(self, runner: TorchModelRunner, ring: RingWriter, limit_s: float) -> None:
        """`limit_s` is the longest time that another rank may take for a step after this one, seconds."""
        self._runner = runner
        self._ring = ring
        self._limit_s = limit_s
        self._form = MessageForm()
        self._num_steps = 0
        self._fault: Exception | None = None

    def launch(self, batch: ScheduledBatch) -> LeadingStep:
        """See `ModelRunner`.

        Raises:
            RankLost: the ranks could not compute an earlier step together.
        """
        if self._fault is not None:
            raise RankLost(f"an earlier step failed: {self._fault}") from self._fault
        samples = not batch.is_constrained
        with self._runner.planner.running():
            planned = self._runner.planner.plan(batch)
            masks = planned.masks.message() if samples and planned.masks is not None else None
        self._num_steps += 1
        with self.together():
            self._publish(RankMessage(self._num_steps, planned.message, samples, masks))
            running = self._runner.run(planned.message)
            if samples:
                self._runner.sample(running, masks)
        return LeadingStep(self, self._num_steps, planned, running)

    def sample(self, planned: PlannedStep, running: RunningStep) -> None:
        """Launch the sampling of the step that was launched last, on all ranks."""
        with self._runner.planner.running():
            masks = None if planned.masks is None else planned.masks.message()
        with self.together():
            self._publish(RankMessage(self._num_steps, None, True, masks))
            self._runner.sample(running, masks)

    def _publish(self, message: RankMessage) -> None:
        self._ring.write(self._form.to_bytes(message))

    def check(self, number: int, running: RunningStep) -> None:
        """Check that all ranks have sampled the same tokens in a step that has ended here.

        Raises:
            RankLost: one has not.
        """
        own = digest_of(running)
        for rank, digest in enumerate(self._ring.digests(number, self._limit_s), start=1):
            if digest != own:
                raise RankLost(f"rank {rank} has sampled other tokens than rank 0 in step {number}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Note an error in what all ranks do: no further step is launched."""
        try:
            yield
        except Exception as error:
            self._fault = error
            raise


class LeadingStep:
    """Launched step of all ranks."""

    def __init__(self, runner: LeadingRunner, number: int, planned: PlannedStep, running: RunningStep) -> None:
        self._runner = runner
        self._number = number
        self._planned = planned
        self._running = running

    def sample(self) -> None:
        """See `LaunchedStep`."""
        if self._running.logits is not None:
            self._runner.sample(self._planned, self._running)

    def collect(self) -> StepResults:
        """See `LaunchedStep`.

        Raises:
            RankLost: another rank has other tokens, or none in time.
        """
        running = self._running
        assert running.logits is None, "the step has not been sampled"
        with self._runner.together():
            running.to_host.wait()
            self._runner.check(self._number, running)
        return self._planned.read(running.tokens, running.scores, running.to_host, running.pooled)


def digest_of(running: RunningStep) -> int:
    """Return a digest of the tokens of a step that has ended, 32 bits."""
    return 0 if running.tokens is None else zlib.crc32(running.to_host[running.tokens.pending].numpy().tobytes())


class FollowingRunner:
    """Runner of another rank: it runs the messages of the first one, and answers with digests of the tokens."""

    def __init__(self, runner: TorchModelRunner, ring: RingReader) -> None:
        self._runner = runner
        self._ring = ring
        self._form = MessageForm()
        self._launched: RunningStep | None = None
        self._sampled: deque[tuple[int, RunningStep]] = deque()

    def follow(self) -> None:
        """Run messages without an end.

        Raises:
            Exception: a step failed; this rank can compute no further one.
        """
        while True:
            self.run_next()

    def run_next(self, limit_s: float = _IDLE_S) -> None:
        """Answer the steps that have ended, and run the next message, if there is one within `limit_s` seconds."""
        while self._sampled and self._sampled[0][1].to_host.has_arrived():
            number, running = self._sampled.popleft()
            self._ring.answer(number, digest_of(running))
        message = self._ring.read(_ANSWER_PAUSE_S if self._sampled else limit_s)
        if message is not None:
            self._run(self._form.of_bytes(message))

    def _run(self, message: RankMessage) -> None:
        if message.step is not None:
            self._launched = self._runner.run(message.step)
        if message.samples:
            assert self._launched is not None, "there is no step to sample"
            self._runner.sample(self._launched, message.masks)
            self._sampled.append((message.number, self._launched))
            self._launched = None
