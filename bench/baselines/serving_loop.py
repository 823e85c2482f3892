"""Loop that gives a trace's requests, as they arrive, to a batching method; one thread, for one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.baselines.policies import Policy
from bench.baselines.trace import TraceRequest
from bench.engine.token_times import TimedEngine, Timeline, TokenTimes

_PADDING_TOKEN_ID = 0


class BatchRunner(Protocol):
    """Runner of a whole batch."""

    def run(self, batch: Sequence[TraceRequest]) -> TokenTimes:
        """Compute exactly the requested number of tokens for every request; return times of the timeline's clock."""
        ...


@dataclass(frozen=True, slots=True)
class StaticBatches:
    """Batches that run to the end of their longest request.

    Without padding, the slot of an ended sequence computes nothing and idles. With padding a batch is a rectangle:
    prompts are padded to the longest, and every row computes until the longest output has ended. Padding tokens stand
    before the prompt and are computed like any token, at the same cost as masked ones. They change the token values,
    not their number or times.
    """

    engine: TimedEngine
    is_padded: bool = False

    def run(self, batch: Sequence[TraceRequest]) -> TokenTimes:
        """Run `batch`; drop the tokens that a row computes after its own end."""
        width = max(len(request.prompt) for request in batch)
        longest = max(request.num_output_tokens for request in batch)
        times: TokenTimes = {}
        for request in batch:
            if self.is_padded:
                padding = (_PADDING_TOKEN_ID,) * (width - len(request.prompt))
                times[request.number] = self.engine.add(padding + request.prompt, longest)
            else:
                times[request.number] = self.engine.add(request.prompt, request.num_output_tokens)
        self.engine.finish()
        return {request.number: times[request.number][: request.num_output_tokens] for request in batch}


def serve_in_batches(
    trace: Sequence[TraceRequest], policy: Policy, runner: BatchRunner, timeline: Timeline
) -> TokenTimes:
    """Run one batch after another until every request is answered; times are seconds after the start of the trace.

    Chosen requests leave the queue here, and all answers are kept: none can be lost or given twice.
    """
    started_s = timeline.clock()
    arriving, waiting = deque(trace), list[TraceRequest]()
    answers: TokenTimes = {}
    while arriving or waiting:
        now = timeline.clock() - started_s
        while arriving and arriving[0].arrival_s <= now:
            waiting.append(arriving.popleft())
        batch = policy.choose(waiting, now)
        if not batch:
            moments = [arriving[0].arrival_s] if arriving else []
            moments += [policy.wakes_s(waiting)] if waiting else []
            timeline.sleep_until(started_s + min(moments))
            continue
        chosen = {request.number for request in batch}
        waiting = [request for request in waiting if request.number not in chosen]
        began_s = timeline.clock()
        for number, times in runner.run(batch).items():
            assert number not in answers, f"request {number} was answered twice"
            answers[number] = [moment - started_s for moment in times]
        policy.batch_ended(batch, timeline.clock() - began_s)
    return answers


def serve_continuously(trace: Sequence[TraceRequest], engine: TimedEngine) -> TokenTimes:
    """Give every request to the engine on arrival; times are seconds after the start of the trace."""
    started_s = engine.timeline.clock()
    arriving = deque(trace)
    times: TokenTimes = {}
    while arriving or engine.has_work:
        now = engine.timeline.clock() - started_s
        while arriving and arriving[0].arrival_s <= now:
            request = arriving.popleft()
            times[request.number] = engine.add(request.prompt, request.num_output_tokens, request.band)
        if engine.has_work:
            engine.step()
        else:
            engine.timeline.sleep_until(started_s + arriving[0].arrival_s)
    return {number: [moment - started_s for moment in moments] for number, moments in times.items()}
