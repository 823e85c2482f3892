"""Admission control of the engine: the checks of a request on arrival."""

from __future__ import annotations

from replicas.engine.config import EngineConfig
from replicas.engine.scheduler import Scheduler
from replicas.engine.stats import EngineStats
from replicas.errors import InvalidRequest, Overloaded
from replicas.protocol import GenerateRequest


class AdmissionControl:
    """Admission control: checks the size of a request and of the waiting queue against the engine's limits."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, stats: EngineStats) -> None:
        self._config = config
        self._scheduler = scheduler
        self._stats = stats

    def check(self, request: GenerateRequest) -> None:
        """Check that `request` can be accepted.

        Raises:
            InvalidRequest: the request could never be served here.
            Overloaded: the waiting queue is at one of its limits.
        """
        self._check_size(request)
        self._check_queue(request)

    def _check_size(self, request: GenerateRequest) -> None:
        limit = self._config.max_model_len
        if request.max_total_tokens > limit:
            raise InvalidRequest(
                f"prompt has {len(request.prompt_token_ids)} tokens and max_tokens is {request.params.max_tokens}, "
                f"together {request.max_total_tokens}; the model accepts {limit}",
                "max_tokens",
                "context_length_exceeded",
            )

    def _check_queue(self, request: GenerateRequest) -> None:
        waiting = self._scheduler.waiting
        num_free_slots = self._config.max_num_seqs - len(self._scheduler.running)
        if len(waiting) < num_free_slots:
            return
        num_queued = len(waiting) - num_free_slots + 1
        if num_queued > self._config.max_queued_requests:
            self._refuse("requests", num_queued, self._config.max_queued_requests, "reqs")
        num_tokens = waiting.num_tokens + request.max_total_tokens
        if num_tokens > self._config.max_queued_tokens:
            self._refuse("tokens", num_tokens, self._config.max_queued_tokens, "tokens")

    def _refuse(self, what: str, value: int, limit: int, reason: str) -> None:
        """Raise `Overloaded`; its retry time is the time in which the queue drains at the measured speed."""
        reason = f"max_num_queued_{reason}"
        self._stats.rejected(reason)
        rate = self._stats.saturated_rate.tokens_per_s
        retry_after_s = self._scheduler.waiting.num_outstanding_tokens / rate if rate > 0 else 1.0
        raise Overloaded(f"the queue would hold {value} {what}; its limit is {limit}", retry_after_s, reason)
