"""Reports of an engine: its load for routers, and its metrics for operators."""

from __future__ import annotations

from replicas.clock import Clock
from replicas.engine.config import EngineConfig
from replicas.engine.scheduler import Scheduler
from replicas.engine.stats import EngineStats, gauge
from replicas.protocol import Band, EngineMetrics, Metric, ReplicaIdentity, ReplicaStats


class LoadReport:
    """Reporter of an engine's load and metrics; it only reads the scheduler and the counters."""

    def __init__(
        self, config: EngineConfig, identity: ReplicaIdentity, scheduler: Scheduler, stats: EngineStats, clock: Clock
    ) -> None:
        self._config = config
        self._identity = identity
        self._scheduler = scheduler
        self._stats = stats
        self._clock = clock

    def load(self, is_draining: bool) -> ReplicaStats:
        """Return the present load."""
        running, held_blocks = [0] * len(Band), [0] * len(Band)
        outstanding_tokens = self._scheduler.waiting.num_outstanding_tokens
        for sequence in self._scheduler.running:
            running[sequence.effective_band] += 1
            held_blocks[sequence.effective_band] += len(sequence.block_table)
            outstanding_tokens += sequence.num_outstanding_tokens
        return ReplicaStats(
            replica_id=self._identity.replica_id,
            node_id=self._identity.node_id,
            pid=self._identity.pid,
            taken_unix_s=self._clock.unix(),
            num_slots=self._config.max_num_seqs,
            num_blocks=self._config.num_blocks,
            num_free_blocks=self._scheduler.num_free_blocks,
            num_running_by_band=tuple(running),
            num_waiting_by_band=self._scheduler.waiting.num_by_band,
            waiting_tokens=self._scheduler.waiting.num_tokens,
            generated_tokens_per_s=self._stats.rate.tokens_per_s,
            is_draining=is_draining,
            num_held_blocks_by_band=tuple(held_blocks),
            outstanding_tokens=outstanding_tokens,
            block_size=self._config.block_size,
            saturated_tokens_per_s=self._stats.saturated_rate.tokens_per_s,
        )

    def metrics(self, load: ReplicaStats) -> EngineMetrics:
        """Return all of the engine's metrics, with the gauges taken from `load`."""
        return EngineMetrics(
            self._identity.replica_id,
            (*self._gauges(load), *self._stats.counters(self._scheduler.num_preemptions)),
            self._stats.histograms(),
        )

    def _gauges(self, load: ReplicaStats) -> tuple[Metric, ...]:
        return (
            gauge("vllm:num_requests_running", "sequences in the running batch", load.num_running),
            gauge("vllm:num_requests_waiting", "sequences waiting for a slot", load.num_waiting),
            gauge(
                "vllm:num_requests_waiting_by_reason", "sequences waiting", load.num_waiting, reason="capacity"
            ),
            gauge("vllm:kv_cache_usage_perc", "blocks held / blocks, 0 to 1", load.kv_usage),
            gauge("headway:step_token_budget", "tokens a step with decodes may compute", self._scheduler.token_budget),
            gauge(
                "vllm:cache_config_info", "KV cache settings", 1, block_size=str(self._config.block_size),
                num_gpu_blocks=str(self._config.num_blocks),
                enable_prefix_caching=str(self._config.enable_prefix_caching),
            ),
        )  # fmt: skip
