"""What the jobs deployment is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobsSettings:
    """Limits and periods; constant over the deployment's life."""

    model_name: str
    """What clients call the model. Work for other models, in the same database, is left to who serves them."""
    max_batch_lines: int = 50_000
    """Most lines of one batch."""
    max_file_bytes: int = 200 * 2**20
    """Largest input file, bytes."""
    max_line_bytes: int = 8 * 2**20
    """Longest line of an input file, bytes."""
    max_batches_per_tenant: int = 10_000
    """Most batches and jobs of one tenant that have not ended; beyond it 429."""
    max_lines_per_tenant: int = 1_000_000
    """Most lines that these may have left to do; beyond it 429."""
    lease_s: float = 10.0
    """A process that has not been heard of for so long loses its lines to others, seconds."""
    keep_results_s: float = 30 * 86_400.0
    """Jobs and prompt batches are forgotten so long after they have ended, seconds."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two signs of life: several may be late before any is missed."""
        return self.lease_s / 5
