"""Prediction of output lengths from the requests that have ended."""

from __future__ import annotations

from collections import OrderedDict, deque

from replicas.protocol import Band, GenerateRequest

_WINDOW = 64
_MAX_KEYS = 4096


class OutputLengths:
    """Running quantile of the output lengths of each tenant and band, over its last 64 requests.

    For an unknown tenant the quantile is the whole band's. In an unknown band a request is expected to use all its
    `max_tokens`. The number of tenants is bounded: the tenants seen longest ago are forgotten.
    """

    def __init__(self, quantile: float = 0.7) -> None:
        self._quantile = quantile
        self._lengths: OrderedDict[tuple[str | None, Band], deque[int]] = OrderedDict()

    def observe(self, tenant: str, band: Band, num_tokens: int) -> None:
        """Note that a request ended after `num_tokens` output tokens."""
        for key in ((tenant, band), (None, band)):
            lengths = self._lengths.setdefault(key, deque(maxlen=_WINDOW))
            lengths.append(num_tokens)
            self._lengths.move_to_end(key)
        while len(self._lengths) > _MAX_KEYS:
            self._lengths.popitem(last=False)

    def expect(self, request: GenerateRequest) -> int:
        """Return the number of output tokens to expect of a request, at most its `max_tokens`."""
        limit = request.params.max_tokens
        known = self._lengths.get((request.tenant, request.band)) or self._lengths.get((None, request.band))
        if not known or (request.params.ignore_eos and not request.params.stop):
            return limit
        ordered = sorted(known)
        return min(limit, ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))])
