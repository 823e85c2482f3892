"""A request on its way through the loss of replicas."""

from __future__ import annotations

from dataclasses import replace

from replicas.protocol import GenerateRequest, TokenDelta

DEATHS_BEFORE_ALONE = 2


class Journey:
    """What a request has given so far, on all the replicas it has been to."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._num_prompt_logprobs = 0
        self._seen_here = 0
        self.output_token_ids: list[int] = []
        self.is_finished = False
        self.first_s: float | None = None
        self.num_deaths = 0
        self.num_moves = 0
        self.num_refusals = 0

    @property
    def runs_alone(self) -> bool:
        """Whether the next replica must run nothing beside it."""
        return self.num_deaths >= DEATHS_BEFORE_ALONE

    def next_request(self) -> GenerateRequest:
        """The request for the next replica: it goes on behind what has been given."""
        request = replace(self._request, output_token_ids=tuple(self.output_token_ids), runs_alone=self.runs_alone)
        if self.output_token_ids:
            # The prompt's scores came before the first token.
            request = replace(request, params=replace(request.params, prompt_logprobs=None))
        self._seen_here = 0
        return request

    def take(self, delta: TokenDelta) -> TokenDelta:
        """Note a delta; it comes back without what the client has already, and without an error."""
        repeated = max(0, self._num_prompt_logprobs - self._seen_here)
        self._seen_here += len(delta.prompt_logprobs)
        self._num_prompt_logprobs = max(self._num_prompt_logprobs, self._seen_here)
        self.output_token_ids += delta.token_ids
        self.num_refusals = 0
        if delta.error is not None:
            delta = replace(delta, finish_reason=None, error=None)
        self.is_finished = delta.finish_reason is not None
        return replace(delta, prompt_logprobs=delta.prompt_logprobs[repeated:]) if repeated else delta

    def moved(self, has_died: bool) -> None:
        """Note that a replica was left."""
        self.num_moves += 1
        self.num_deaths += has_died
