"""Usage of the server: tokens and computing time by day, tenant, model and band."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import date

from replicas.protocol import Band


@dataclass(frozen=True, slots=True)
class UsageKey:
    """Key of a sum of usage."""

    day: str
    """Day of the end of the work, `YYYY-MM-DD` in UTC."""
    tenant: str
    """Owner of the API key."""
    model: str
    band: Band


@dataclass(slots=True)
class UsageSums:
    """Sums of usage over completions."""

    num_requests: int = 0
    """Completions that were started."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens among these that were found in a KV cache."""
    output_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that the replicas computed, each as often as they did."""
    wasted_tokens: int = 0
    """Tokens among these that were computed again, after a preemption or on another replica, or for a completion that
    was not answered to its end."""
    device_s: float = 0.0
    """Computing time of the replicas, seconds: of a GPU, or of all threads of a replica on a processor."""

    def add(self, other: UsageSums) -> None:
        """Add other sums."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Usage of one key."""

    key: UsageKey
    sums: UsageSums


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage that a process has not reported before."""

    reporter_id: str
    """Unique id of the process."""
    number: int
    """Number of the report, from 1. A report may come again, and counts once."""
    rows: tuple[UsageRow, ...]


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Query for usage."""

    first_day: date
    last_day: date
    """Last day; it is in the answer."""
    tenant: str | None
    """Tenant; None: all."""
    model: str | None
    """Model; None: all."""
    limit: int
    """Most rows of the answer."""


@dataclass(frozen=True, slots=True)
class UsagePage:
    """Usage in order of day, tenant, model and band."""

    rows: tuple[UsageRow, ...]
    has_more: bool
