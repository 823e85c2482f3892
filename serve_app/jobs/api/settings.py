"""Settings of jobs and batches."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.settings import check_bounds, setting


@dataclass(frozen=True, slots=True)
class JobsSettings:
    """Limits and periods of a jobs process; they never change while it runs."""

    model_name: str
    """Name of the served model. Batches of other models in the same database belong to other processes."""
    max_line_bytes: int = 8 * 2**20
    """Longest line of an input file, bytes."""
    max_batch_lines: int = setting(50_000, ge=1)
    """Most requests in one batch."""
    max_file_bytes: int = setting(200 * 2**20, gt=0)
    """Size of the largest uploaded file, bytes."""
    max_unfinished_batches: int = setting(10_000, ge=1)
    """Most unfinished batches and jobs of one tenant. Further ones are refused with status 429."""
    max_unfinished_lines: int = setting(1_000_000, ge=1)
    """Most unfinished requests in the batches of one tenant. Further ones are refused with status 429."""
    job_lease_s: float = setting(10.0, gt=0)
    """Seconds without a heartbeat after which a jobs process counts as dead and its work is done again."""
    keep_results_s: float = setting(30 * 86_400.0, gt=0)
    """Seconds after their end at which jobs and prompt batches are deleted. Files and their batches are kept."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats: a fifth of the lease, so several may be missed before it ends."""
        return self.job_lease_s / 5
