"""Requests that are ready to start, with the format of their replies."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.protocol import GenerateRequest
from router.timeline import Timeline
from serve_app.openai.reply.format import JsonObject, Progress, ReplyFormat
from serve_app.openai.reply.request_metrics import slowest_of
from serve_app.openai.request.schema import GenerationBody


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """Valid request that is ready to start, with the format of its reply."""

    id: str
    """Id of the reply."""
    model: str
    """Name of the model in the reply."""
    account: str
    """Tenant of the API key, to which the work is charged."""
    body: GenerationBody
    requests: tuple[GenerateRequest, ...]
    format: ReplyFormat
    progress: Progress
    timelines: tuple[Timeline, ...]
    """Timeline of each request, in their order."""
    not_enforced: tuple[str, ...] = ()
    """JSON pointers to the keywords of the request's JSON Schemas that are not enforced."""

    @property
    def timeline(self) -> Timeline:
        """Timeline of the sequence that ended last, or of one that has not ended."""
        return slowest_of(self.timelines)

    @property
    def first_delta_s(self) -> float | None:
        """Arrival of the first delta of any choice, monotonic seconds; None: there is none yet."""
        return min((each.first_delta_s for each in self.timelines if each.first_delta_s is not None), default=None)

    @property
    def longest_outputs(self) -> list[int]:
        """Output tokens of the longest choice of each prompt whose choices have all ended."""
        num_choices = self.body.n
        prompts = (self.timelines[at : at + num_choices] for at in range(0, len(self.timelines), num_choices))
        return [
            max(choice.num_output_tokens for choice in choices)
            for choices in prompts
            if all(choice.finished_s is not None for choice in choices)
        ]

    def usage(self) -> JsonObject:
        """Return OpenAI's usage object."""
        return self.progress.usage() | self.format.usage_details()
