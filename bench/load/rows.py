"""Record of one request, from its client's view."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path


class Outcome(Enum):
    """End of a request, from its client's view."""

    OK = "ok"
    """A whole stream: 2xx, a finish reason, no error event."""
    REFUSED = "refused"
    """Status 429."""
    CLIENT_ERROR = "client_error"
    """Any other 4xx."""
    SERVER_ERROR = "server_error"
    """Any 5xx."""
    STREAM_ERROR = "stream_error"
    """An error event after 2xx."""
    TRUNCATED = "truncated"
    """2xx, but the stream ended with neither finish reason nor error."""
    FAILED = "failed"
    """The connection failed, or the time-out passed."""
    CUT_OFF = "cut_off"
    """Still open at the end of the run."""


@dataclass(slots=True)
class Row:
    """One request, in seconds after the start of the run; written by the task that sends it."""

    index: int
    stream: str
    priority: int
    user: str | None
    group: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    """Output tokens that it is to produce."""
    scheduled_s: float
    sent_s: float | None = None
    """Time at which the first attempt left."""
    last_sent_s: float | None = None
    """Time at which the last attempt left."""
    end_s: float | None = None
    status: int | None = None
    """Status of the last attempt; None: no response."""
    finish_reason: str | None = None
    error_code: str | None = None
    replica_id: str | None = None
    num_attempts: int = 0
    is_cut_off: bool = False
    chunk_s: list[float] = field(default_factory=list)
    """Arrival times of the chunks with tokens."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Number of tokens of each of these chunks."""
    token_ids: list[int] = field(default_factory=list)

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
        return Outcome.OK if self.finish_reason in ("stop", "length") else Outcome.TRUNCATED

    @property
    def num_tokens(self) -> int:
        """Output tokens received."""
        return sum(self.chunk_tokens)

    @property
    def lateness_s(self) -> float:
        """Delay of the first attempt after its scheduled time."""
        return 0.0 if self.sent_s is None else self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time from the *scheduled* moment to the first token, so that late sends and retries count."""
        return self.chunk_s[0] - self.scheduled_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (tokens - 1); None with fewer than two chunks, since one chunk has no pace."""
        if len(self.chunk_s) < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - self.chunk_tokens[0])

    @property
    def inter_token_s(self) -> list[float]:
        """One value per token after the first chunk: the gap before its chunk / the chunk's tokens."""
        gaps = []
        for earlier, later, num_tokens in zip(self.chunk_s, self.chunk_s[1:], self.chunk_tokens[1:], strict=False):
            gaps += [(later - earlier) / num_tokens] * num_tokens
        return gaps


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line."""
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Read a file of `write_rows`."""
    with path.open() as file:
        return [Row(**json.loads(line)) for line in file]
