"""Backlog of batch work for the autoscaler."""

from __future__ import annotations

from collections.abc import Sequence

from router.scaling.scaling_inputs import BacklogWork
from serve_app.jobs.execution.throughput import ThroughputEstimator
from serve_app.jobs.storage.batch_queue import Backlog


class BacklogView:
    """Backlog found by the latest poll of the database; a `router.scaling.scaling_inputs.BacklogSource`."""

    def __init__(self, throughput: ThroughputEstimator) -> None:
        self.throughput = throughput
        self.waiting: Sequence[Backlog] = ()
        """Queued lines in the database."""
        self.not_sent: Sequence[Backlog] = ()
        """Leased lines that are not yet in flow control's queue, for example because no replica was ever ready."""

    def num_requests(self) -> int:
        """Return the number of waiting lines."""
        return sum(backlog.num_lines for backlog in (*self.waiting, *self.not_sent))

    def eta_s(self) -> float:
        """Return the estimated seconds until all queued lines in the database are done; infinite at zero speed."""
        return self.throughput.eta_of_all_s(self.waiting)

    def work(self) -> Sequence[BacklogWork]:
        """Return the tokens that the waiting lines will need, by band and deadline."""
        ratio = self.throughput.actual_per_expected
        return [
            BacklogWork(backlog.band, int(ratio * backlog.tokens) + 1, backlog.expires_unix_s)
            for backlog in (*self.waiting, *self.not_sent)
        ]
