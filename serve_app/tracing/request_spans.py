"""Spans of a request, made from its timelines when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from opentelemetry.trace import Span, SpanKind
from pydantic_core import to_json

from router.timeline import QUEUED, Interval, Part, Placed, Seconds, Timeline, queued_s
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.request.pooled_schema import AnyBody
from serve_app.tracing.tracer import Attributes, SpanTimes, Trace

_MAX_SEQUENCES = 16
"""Sequences of a request that have spans: those that ended last."""
_BEFORE = (Part.RECEIVED, Part.TOKENIZING)
_FIRST_ORDER = (Part.QUEUED_REPLICA, Part.PREFILL, Part.MIGRATED, Part.PREEMPTED, Part.DECODE, Part.DELIVERED)
"""Order of the parts until a replica's first delta."""
_LATER_ORDER = (Part.QUEUED_REPLICA, Part.DECODE, Part.PREEMPTED, Part.PREFILL, Part.MIGRATED, Part.DELIVERED)
"""Order of the parts from then on."""
_MAX_PROMPT_BYTES = 65_536


def add_request(trace: Trace, timeline: Timeline, prepared: PreparedCompletion | None, has_prompts: bool) -> None:
    """Add the spans below a request's first one: its preparation, and the work of its sequences.

    `timeline` is the request's until its preparation. `has_prompts`: the spans may have the text of the prompt.
    """
    if not trace.is_recorded:
        return
    # A sequence's timeline begins with the request's, which does not learn that the preparation has ended.
    intervals = (timeline if prepared is None else prepared.timelines[0]).intervals
    is_completion = any(each.seconds.get(Part.TOKENIZING) for each in intervals)
    for interval in intervals if is_completion else ():
        for part, times in _pieces(interval, _BEFORE):
            trace.add(part.value, trace.first, times)
    if prepared is not None:
        _add_completion(trace, prepared, has_prompts)


def _add_completion(trace: Trace, prepared: PreparedCompletion, has_prompts: bool) -> None:
    slowest = prepared.timeline
    start_s = slowest.started_s if slowest.queued_s is None else slowest.queued_s
    end_s = slowest.ended_s
    if end_s is None or start_s > end_s:
        return
    attributes = _completion_attributes(prepared)
    if has_prompts:
        attributes = {**attributes, **_prompt_attributes(prepared.body)}
    name = f"{prepared.body.operation} {prepared.body.model}"
    span = trace.add(name, trace.first, SpanTimes(start_s, end_s), attributes, SpanKind.CLIENT)
    timelines = sorted(prepared.timelines, key=lambda line: line.finished_s or end_s, reverse=True)
    for timeline in timelines[:_MAX_SEQUENCES]:
        parent = span
        if len(prepared.timelines) > 1:
            index = next(index for index, line in enumerate(prepared.timelines) if line is timeline)
            parent = trace.add("sequence", span, SpanTimes(start_s, end_s), {"headway.sequence.index": index})
        _add_sequence(trace, parent, timeline)
    parsing = prepared.format.parsing
    if parsing is not None and parsing.start_s is not None and parsing.end_s is not None:
        times = SpanTimes(parsing.start_s, parsing.end_s)
        trace.add("tool_parsing", span, times, {"headway.tool_parsing.busy_s": parsing.busy_s})


def _add_sequence(trace: Trace, parent: Span, timeline: Timeline) -> None:
    """Add the waits and the placements of a sequence."""
    for stay in stays(timeline):
        if stay.placement is None:
            trace.add("queue", parent, stay.times, {f"headway.{part.value}_s": s for part, s in stay.reasons.items()})
            continue
        attributes = {
            "headway.replica_id": stay.placement.replica_id,
            "headway.placement.reason": stay.placement.reason.value,
        }
        error_type = "replica_lost" if stay.is_lost else None
        span = trace.add("placement", parent, stay.times, attributes, error_type=error_type)
        for part, times in stay.phases:
            trace.add(part.value, span, times)


@dataclass(frozen=True, slots=True)
class Stay:
    """Stay of a sequence in the queue, or on one replica."""

    placement: Placed | None
    """Dispatch to the replica; None: the sequence waits."""
    times: SpanTimes
    reasons: Seconds
    """Seconds of the wait by their reason."""
    phases: Sequence[tuple[Part, SpanTimes]] = ()
    """Phases on the replica in their order."""
    is_lost: bool = False
    """True if the sequence left the replica before its end."""


def stays(timeline: Timeline) -> list[Stay]:
    """Return the waits and the placements of a sequence that has ended, in their order."""
    inside = [interval for interval in timeline.intervals if not any(interval.seconds.get(part) for part in _BEFORE)]
    groups = [list(group) for _, group in groupby(inside, key=lambda interval: id(interval.placement))]
    joined = []
    for group in groups:
        placement, times = group[0].placement, SpanTimes(group[0].start_s, group[-1].end_s)
        if placement is None:
            joined.append(Stay(None, times, _reasons(group)))
        else:
            is_lost = placement is not timeline.placements[-1]
            joined.append(Stay(placement, times, {}, _joined(_phases(group)), is_lost))
    return joined


def _phases(group: Sequence[Interval]) -> Iterator[tuple[Part, SpanTimes]]:
    for index, interval in enumerate(group):
        yield from _pieces(interval, _FIRST_ORDER if index == 0 else _LATER_ORDER)


def _pieces(interval: Interval, order: Iterable[Part]) -> Iterator[tuple[Part, SpanTimes]]:
    """Yield the parts of an interval one after the other: their lengths are known, and the order in which they come."""
    start_s = interval.start_s
    for part in order:
        part_s = interval.seconds.get(part, 0.0)
        if part_s > 0.0:
            yield part, SpanTimes(start_s, min(start_s + part_s, interval.end_s))
            start_s += part_s


def _joined(pieces: Iterable[tuple[Part, SpanTimes]]) -> list[tuple[Part, SpanTimes]]:
    """Return the pieces, with successive ones of one part joined."""
    joined: list[tuple[Part, SpanTimes]] = []
    for part, times in pieces:
        if joined and joined[-1][0] is part:
            joined[-1] = part, SpanTimes(joined[-1][1].start_s, times.end_s)
        else:
            joined.append((part, times))
    return joined


def _reasons(group: Sequence[Interval]) -> Seconds:
    sums = {part: sum(each.seconds.get(part, 0.0) for each in group) for part in QUEUED}
    return {part: seconds for part, seconds in sums.items() if seconds > 0.0}


def _completion_attributes(prepared: PreparedCompletion) -> Attributes:
    """Return the attributes of the conventions for generative AI, vLLM's beyond them, and Headway's own."""
    body, progress, first, timeline = prepared.body, prepared.progress, prepared.requests[0], prepared.timeline
    params, first_s = first.params, prepared.first_delta_s
    ttft_s = None if first_s is None else first_s - timeline.started_s
    seconds = timeline.seconds(timeline.ended_s or 0.0)
    details = prepared.format.usage_details().get("completion_tokens_details", {})
    return {
        "gen_ai.operation.name": body.operation,
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": body.model,
        "gen_ai.request.stream": body.stream,
        "gen_ai.request.choice.count": None if body.n == 1 else body.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.seed": body.seed,
        "gen_ai.response.id": prepared.id,
        "gen_ai.response.model": prepared.model,
        "gen_ai.response.finish_reasons": progress.finish_reasons or None,
        "gen_ai.response.time_to_first_chunk": ttft_s if body.stream else None,
        "gen_ai.usage.input_tokens": progress.prompt_tokens,
        "gen_ai.usage.output_tokens": progress.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": progress.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": details.get("reasoning_tokens"),
        "gen_ai.latency.time_in_queue": queued_s(seconds),
        "gen_ai.latency.time_to_first_token": ttft_s,
        "gen_ai.latency.e2e": timeline.total_s(timeline.ended_s or 0.0),
        "headway.tenant": first.tenant,
        "headway.band": first.band.name.lower(),
        "headway.num_sequences": len(prepared.requests),
        "headway.num_preemptions": sum(each.num_preemptions for each in prepared.timelines),
        "headway.num_migrations": sum(each.num_migrations for each in prepared.timelines),
    }


def _prompt_attributes(body: AnyBody) -> Attributes:
    """Return the text of the prompt, or its size if it is too long for a span."""
    text = to_json(body.input_messages)
    if len(text) > _MAX_PROMPT_BYTES:
        return {"headway.prompt_bytes": len(text)}
    return {"gen_ai.input.messages": text.decode()}


@dataclass(frozen=True, slots=True)
class HttpEnd:
    """End of an HTTP exchange, for its first span."""

    method: str
    route: str | None
    """Pattern of the path; None: no route has it."""
    path: str
    request_id: str
    status: int
    error_code: str | None
    ended_s: float

    def end(self, trace: Trace) -> None:
        """End the first span. A status below 500 is no error of a server, by the conventions for HTTP."""
        error_type = None
        if self.status >= 500 or self.status == 0:
            error_type = self.error_code or str(self.status)
        trace.first.update_name(self.method if self.route is None else f"{self.method} {self.route}")
        attributes: Attributes = {
            "http.request.method": self.method,
            "http.route": self.route,
            "url.path": self.path,
            "http.response.status_code": self.status or None,
            "headway.request_id": self.request_id,
            "headway.error_code": self.error_code,
        }
        trace.end(self.ended_s, attributes, error_type)
