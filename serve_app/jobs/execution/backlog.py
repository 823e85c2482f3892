"""Work that waits in the database, as the autoscaler counts it."""

from __future__ import annotations

from collections.abc import Sequence

from router.scaling.scaling_inputs import BacklogWork
from serve_app.jobs.execution.throughput import ThroughputEstimator
from serve_app.jobs.storage.batch_queue import Backlog


class BacklogView:
    """Backlog that the newest look found; a `router.scaling.scaling_inputs.BacklogSource`."""

    def __init__(self, throughput: ThroughputEstimator) -> None:
        self.throughput = throughput
        self.waiting: Sequence[Backlog] = ()
        """In the database."""
        self.not_sent: Sequence[Backlog] = ()
        """Leased, but not yet in flow control's queue, as when no replica has ever been ready to say what it serves."""

    def num_requests(self) -> int:
        """Lines that wait."""
        return sum(backlog.num_lines for backlog in (*self.waiting, *self.not_sent))

    def eta_s(self) -> float:
        """Seconds until all of it is done; infinite where nothing moves."""
        return self.throughput.eta_of_all_s(self.waiting)

    def work(self) -> Sequence[BacklogWork]:
        """Tokens that these lines need, by band and deadline."""
        ratio = self.throughput.actual_per_expected
        return [
            BacklogWork(backlog.band, int(ratio * backlog.tokens) + 1, backlog.expires_unix_s)
            for backlog in (*self.waiting, *self.not_sent)
        ]
