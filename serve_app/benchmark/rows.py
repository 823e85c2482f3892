"""Record of one request, from its client's view, and the latency targets that it may meet."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

_WHOLE = ("stop", "length", "tool_calls", "content_filter")
"""Finish reasons of a stream that is whole."""


class Outcome(Enum):
    """End of a request, from its client's view."""

    OK = "ok"
    """Whole stream: 2xx, a finish reason, no error event."""
    REFUSED = "refused"
    """Status 429."""
    CLIENT_ERROR = "client_error"
    """Any other 4xx."""
    SERVER_ERROR = "server_error"
    """Any 5xx."""
    STREAM_ERROR = "stream_error"
    """Error event after 2xx."""
    TRUNCATED = "truncated"
    """2xx, but the stream ended with neither finish reason nor error."""
    FAILED = "failed"
    """The connection failed, or the time-out passed."""
    CUT_OFF = "cut_off"
    """Still open at the end of the run."""


@dataclass(slots=True)
class Row:
    """One request, in seconds after the start of the run; written by the task that sends it.

    Chunks that are read together count as one: they arrived at the same time.
    """

    index: int
    num_prompt_tokens: int
    """Prompt tokens that it is to have."""
    num_output_tokens: int
    """Output tokens that it is to produce."""
    scheduled_s: float
    """Time at which it is to leave; where one request follows another, the end of the one before."""
    priority: int = 1
    """Band: 0 interactive, 1 standard, 2 batch."""
    stream: str | None = None
    """Kind of request, in a load of several kinds."""
    sent_s: float | None = None
    """Time at which the first attempt left."""
    last_sent_s: float | None = None
    """Time at which the last attempt left."""
    end_s: float | None = None
    status: int | None = None
    """Status of the last attempt; None: no response."""
    finish_reason: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    replica_id: str | None = None
    num_attempts: int = 0
    is_cut_off: bool = False
    chunk_s: list[float] = field(default_factory=list)
    """Arrival times of the chunks with output."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Number of tokens of each of these chunks; 1 for each where the server does not count them."""
    token_ids: list[int] = field(default_factory=list)
    """Output tokens, where the server sends their ids."""
    usage_prompt_tokens: int | None = None
    """Prompt tokens by the server's own count."""
    usage_output_tokens: int | None = None

    @property
    def outcome(self) -> Outcome:
        """End of the request."""
        if self.is_cut_off:
            return Outcome.CUT_OFF
        if self.status is None:
            return Outcome.FAILED
        if self.status == 429:
            return Outcome.REFUSED
        if self.status >= 400:
            return Outcome.SERVER_ERROR if self.status >= 500 else Outcome.CLIENT_ERROR
        if self.error_code is not None:
            return Outcome.FAILED if self.error_code.startswith("client:") else Outcome.STREAM_ERROR
        return Outcome.OK if self.finish_reason in _WHOLE else Outcome.TRUNCATED

    @property
    def num_tokens(self) -> int:
        """Output tokens received: by ids, else by the server's usage, else one for each chunk."""
        return sum(self.chunk_tokens) if self._has_own_count else self.usage_output_tokens or 0

    @property
    def tokens_by_chunk(self) -> list[float]:
        """Number of tokens of each chunk; an even share of the usage where the server sends no ids."""
        if self._has_own_count or not self.chunk_s:
            return [float(count) for count in self.chunk_tokens]
        return [self.num_tokens / len(self.chunk_s)] * len(self.chunk_s)

    @property
    def _has_own_count(self) -> bool:
        """True if the chunks' own counts are the best that is known."""
        return bool(self.token_ids) or self.usage_output_tokens is None

    @property
    def lateness_s(self) -> float:
        """Delay of the first attempt after its scheduled time."""
        return 0.0 if self.sent_s is None else self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time from the *scheduled* moment to the first token, so that late sends and retries count."""
        return self.chunk_s[0] - self.scheduled_s if self.chunk_s else None

    @property
    def total_s(self) -> float | None:
        """Time from the scheduled moment to the end of the response."""
        return None if self.end_s is None else self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first chunk's time) / tokens after the first chunk; None with fewer than two chunks."""
        if len(self.chunk_s) < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / sum(self.tokens_by_chunk[1:])

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between the arrivals of its chunks."""
        return [later - earlier for earlier, later in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def inter_token_s(self) -> list[float]:
        """Gap of each token after the first chunk: the gap before its chunk / the chunk's tokens."""
        gaps = []
        for gap_s, num_tokens in zip(self.gaps_s, self.tokens_by_chunk[1:], strict=True):
            gaps += [gap_s / num_tokens] * max(1, round(num_tokens))
        return gaps


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets. A request that meets both counts as goodput."""

    ttft_ms: float | None = None
    """Longest time to first token; None: no limit."""
    itl_ms: float | None = None
    """Longest mean time between two tokens of a request (its TPOT); None: no limit."""

    def are_met(self, row: Row) -> bool:
        """Return True if a whole response met both; a response of one chunk has no time between tokens to miss."""
        if row.outcome is not Outcome.OK or row.ttft_s is None:
            return False
        is_soon = self.ttft_ms is None or row.ttft_s * 1e3 <= self.ttft_ms
        return is_soon and (self.itl_ms is None or row.tpot_s is None or row.tpot_s * 1e3 <= self.itl_ms)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line."""
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Read a file of `write_rows`."""
    with path.open() as file:
        return [Row(**json.loads(line)) for line in file]
