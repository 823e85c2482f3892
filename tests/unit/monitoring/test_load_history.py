"""Samples of the load: sums over replicas and queues, and no more than an hour of them."""

from itertools import count
from typing import cast

import pytest

from replicas.protocol import Band
from router.dispatch import Dispatcher
from router.flow.flow_queue import TenantQueue
from serve_app.monitoring.load_history import NUM_SAMPLES, PERIOD_S, LoadHistory
from testkit.http.scripted_dispatcher import FakeDispatcher, FakeReplica


def history_over(dispatcher: FakeDispatcher) -> LoadHistory:
    times = count(0, PERIOD_S)
    return LoadHistory(cast("Dispatcher", dispatcher), lambda: next(times))


def test_a_sample_sums_replicas_and_queues() -> None:
    queued = {Band.BATCH: {"nightly": TenantQueue(7, 700)}, Band.STANDARD: {"acme": TenantQueue(2, 20)}}
    history = history_over(FakeDispatcher(FakeReplica([]), None, queued=queued))
    history.add_sample()
    [sample] = history.samples
    assert (sample.tokens_per_s, sample.num_running) == (12.5, 0)
    assert sample.num_waiting == 7 + 2 + 3, "those in the replica's queue count, too"
    assert sample.kv_usage == pytest.approx(0.25)


def test_without_replicas_nothing_is_held() -> None:
    history = history_over(FakeDispatcher(FakeReplica([]), None, views=[]))
    history.add_sample()
    assert history.samples[0].kv_usage == 0


def test_an_hour_is_kept() -> None:
    history = history_over(FakeDispatcher(FakeReplica([]), None))
    for _ in range(NUM_SAMPLES + 5):
        history.add_sample()
    times = [sample.time_unix_s for sample in history.samples]
    assert len(times) == NUM_SAMPLES
    assert times[0] == 5 * PERIOD_S
    assert times[-1] - times[0] == 3600 - PERIOD_S
