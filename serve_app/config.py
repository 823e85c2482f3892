"""Every choice an operator has, read and checked once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, get_args

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from replicas.engine.config import KVPressurePolicy
from replicas.protocol import Band
from router.autoscaling import AutoscalingSettings
from router.flow_control import FlowLimits
from router.flow_queue import BandLimits
from router.latency_targets import LatencyTargets
from serve_app.jobs.settings import JobsSettings
from serve_app.jobs.webhook_addresses import AllowedHosts

if TYPE_CHECKING:
    from replicas.model_replica import ReplicaOptions

DEMO_MODEL_NAME = "headway-demo"

_DEMO_MODEL_DIRECTORY = Path(__file__).resolve().parents[1] / "replicas" / "demo"

_PROMOTE_SHARE = 0.75
"""Of `max_starvation_s`, when a request is promoted: in the rest a slot comes free and its prompt is computed."""
_LOOKAHEAD = 1
"""Requests of a band that wait in a replica for its next slot, which else stands empty until the ingress has heard."""

_CONTROL_CALLS = 64
"""Polls, health checks, metrics and calls on their way out that a replica may hold beside its requests."""


class HeadwayConfig(BaseModel):
    """What is served and within which limits; each field may be given as `key=value` to `serve run`.

    The defaults serve the bundled demo model on one machine without a GPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: str | None = None
    """Directory or hub id of the model; none: the bundled demo model."""
    served_model_name: str | None = Field(default=None, min_length=1)
    """The name clients ask for; none: the directory's name or the hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV cache; auto: bfloat16 where the hardware has it natively, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: the GPU that a replica was given, else the CPU."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens (prompt + output) of one sequence; none: as many as the model and the KV cache allow."""

    num_replicas: int = Field(default=1, ge=1)
    """Model replicas to start with, each a process with its own copy of the model."""
    min_replicas: int | None = Field(default=None, ge=0)
    """Fewest model replicas; none: `num_replicas`; 0: none at all while there is nothing to do."""
    max_replicas: int | None = Field(default=None, ge=1)
    """Most model replicas; none: as many as the cluster's GPUs are enough for, without GPUs `num_replicas`.

    Their number follows the load wherever this is above the fewest.
    """
    target_drain_s: float = Field(default=2.0, gt=0)
    """Replicas are added until what waits, save batch work, could be done within this time, seconds."""
    batch_drain_s: float = Field(default=86_400.0, gt=0)
    """Batch work without a deadline is to be done within this time, seconds; with one, in time for it."""
    downscale_delay_s: float = Field(default=60.0, ge=0)
    """Replicas are given back when fewer have been enough for this long, seconds."""
    scale_to_zero_delay_s: float = Field(default=300.0, ge=0)
    """The last replica is given back when there has been no request for this long, seconds; needs `min_replicas=0`."""
    replica_tokens_per_s: float = Field(default=1000.0, gt=0)
    """Tokens a second, prompt and output, that a replica is taken to compute until one has been measured under load."""
    autoscale_interval_s: float = Field(default=0.2, gt=0)
    """Seconds between two reports of the number of replicas asked for to Serve's controller."""
    num_gpus_per_replica: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for a model replica; none: 1 where the cluster has GPUs, else 0."""
    cpus_per_replica: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a model replica."""
    num_threads: int | None = Field(default=None, ge=1)
    """torch threads of a model replica on CPU; none: as many as its reserved CPUs, at least 1."""
    kernel_cache_dir: str | None = "~/.cache/headway"
    """Directory of the kernels that the first replica on a machine without a GPU compiles there when it starts.

    That takes about half a minute, once for each version of torch. None: replicas do without them, and are slower.
    """
    quantization: Literal["none", "int8"] = "none"
    """int8: a replica on CPU keeps the weights of linear layers in 8 bits, for speed and memory; needs its kernels."""
    graceful_shutdown_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds that running requests have to finish when a replica is stopped."""
    health_check_period_s: float = Field(default=1.0, gt=0)
    """Seconds between two health checks of a replica."""
    health_check_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which an unanswered health check has failed; three failures replace the replica."""

    block_size: int = Field(default=16, ge=1)
    """Token slots in one KV block."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Sequences that run together in one replica."""
    max_num_batched_tokens: int = Field(default=512, ge=1)
    """Tokens computed in one engine step, at most; less makes decodes smoother and prefills slower."""
    async_scheduling: bool | None = None
    """Schedule and launch a step before the tokens of the one before are known; none: with a GPU only."""
    enforce_eager: bool = False
    """On a GPU, launch a decode's operations one by one, not as CUDA graphs, which are captured at start-up."""
    compile_layers: bool = False
    """On a GPU, have torch.compile fuse the layers of models that have no fused ones of ours; takes start-up time."""
    target_itl_ms: float | None = Field(default=None, gt=0)
    """Milliseconds between two tokens of a stream to aim at, by prefilling less beside decodes; none: no target."""
    max_num_partial_prefills: int = Field(default=2, ge=1)
    """Prompts of one replica that may be part-way through their prefill at once."""
    enable_prefix_caching: bool = True
    """true: sequences that start with the same tokens share their KV blocks; false: each computes its own."""
    kv_pressure_policy: KVPressurePolicy = KVPressurePolicy.PREEMPT
    """When KV blocks run short: `preempt` the least urgent sequence, or `pause_new` admissions."""
    max_queued_requests: int = Field(default=1024, ge=1)
    """Sequences of one band that may wait in one ingress; beyond it 429."""
    max_queued_tokens: int = Field(default=4_000_000, ge=1)
    """Tokens, prompt and output expected, of the sequences of one band that wait in one ingress; beyond it 429."""
    max_queued_batch_requests: int = Field(default=16_384, ge=1)
    """The same limit for the band `batch`, where waiting is the rule."""
    max_queued_batch_tokens: int = Field(default=64_000_000, ge=1)
    """The same limit for the band `batch`."""
    max_starvation_s: float = Field(default=30.0, gt=0)
    """A band that waits gets a first token at least this often, seconds, where replicas finish sequences meanwhile."""
    max_interactive_wait_s: float | None = Field(default=10.0, gt=0)
    """An interactive request that is predicted to start later than this is refused (429), seconds; none: it waits."""
    max_standard_wait_s: float | None = Field(default=60.0, gt=0)
    """The same for the band `standard`."""
    max_queue_wait_s: float = Field(default=600.0, gt=0)
    """Longest that a request waits for a replica, seconds; then 504, or 503 where there is no replica at all."""
    routing_policy: Literal["least_tokens", "least_requests", "power_of_two", "round_robin", "random"] = "least_tokens"
    """Which replica a request goes to: the one with the least work in tokens after prefix hits, or a baseline."""
    num_bound_early: int = Field(default=0, ge=0)
    """Requests of each band given to a replica beyond its slots; 0: they wait in the ingress for the first slot."""
    kv_cache_bytes: ByteSize = Field(default=ByteSize(512 * 2**20), gt=0)
    """Size of a replica's KV cache on CPU, bytes; also as `2GiB`."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that weights, activations and KV cache may take."""
    attention_backend: Literal["auto", "flash", "triton", "gather"] = "auto"
    """What computes attention: flash: FlashAttention 3, where it is installed; triton: our GPU kernels; gather: plain
    torch; auto: the first that proves right at start-up. One asked for that does not stops the replica."""
    coalesce_interval_s: float = Field(default=0.03, ge=0)
    """A stream's deltas after its first are sent at most this often, seconds ..."""
    coalesce_tokens: int = Field(default=8, ge=1)
    """... or as soon as this many tokens wait."""
    max_deltas_per_s: float | None = Field(default=None, gt=0)
    """Deltas of all of a replica's streams together: with more streams each sends less often, however many tokens wait;
    none: 2,000, or 25 for each processor where the engine computes on those that carry them."""

    num_ingress_replicas: int = Field(default=1, ge=1)
    """HTTP ingress processes."""
    cpus_per_ingress: float = Field(default=0.0, ge=0)
    """CPUs that Ray reserves for an ingress replica."""
    interactive_ttft_target_s: float | None = Field(default=1.0, gt=0)
    """Time to first token within which an interactive request is in time, seconds; none: it always is. Nothing is
    refused or ordered by it; `headway:slo_attained_total` and `headway:goodput_tokens_total` count what was in time."""
    interactive_tpot_target_s: float | None = Field(default=0.15, gt=0)
    """The same for the mean time between its output tokens, seconds."""
    standard_ttft_target_s: float | None = Field(default=5.0, gt=0)
    """`interactive_ttft_target_s` of the band `standard`, seconds."""
    standard_tpot_target_s: float | None = Field(default=0.25, gt=0)
    """`interactive_tpot_target_s` of the band `standard`, seconds."""
    batch_ttft_target_s: float | None = Field(default=None, gt=0)
    """`interactive_ttft_target_s` of the band `batch`, seconds."""
    batch_tpot_target_s: float | None = Field(default=None, gt=0)
    """`interactive_tpot_target_s` of the band `batch`, seconds."""
    load_poll_period_s: float = Field(default=1.0, gt=0)
    """Seconds between two polls of every model replica's load by each ingress."""
    api_key_file: str | None = None
    """File of API keys; none: every client is anonymous and unlimited."""
    allowed_hosts: str = "*"
    """`Host` headers that are answered, separated by commas and without ports; `*`: all; beyond them 403. `make serve`
    on a loopback address answers that machine's loopback names, so that no web page reaches it by DNS rebinding."""
    max_body_bytes: ByteSize = Field(default=ByteSize(8 * 2**20), gt=0)
    """Largest HTTP request body, bytes; beyond it 413."""
    max_prompts: int = Field(default=128, ge=1)
    """Most prompts in one completions request."""
    max_choices: int = Field(default=128, ge=1)
    """Most choices (`n`, times prompts) in one request."""
    max_logprobs: int = Field(default=20, ge=0)
    """Most likeliest tokens that a request may ask for at each position."""
    num_tokenizer_threads: int = Field(default=2, ge=1)
    """Threads of an ingress that render chat templates and tokenize."""
    upload_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a request body may take to arrive; beyond it 408."""
    keep_alive_s: float = Field(default=10.0, gt=0)
    """Longest silence on a stream, seconds, before a comment is sent."""
    stall_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of silence of a replica with running sequences after which it no longer counts as live."""

    data_dir: str = Field(default="~/.headway", validate_default=True)
    """Directory of what must outlive the processes: the jobs' database and files, unless these are elsewhere."""
    database_url: str | None = None
    """`postgresql+psycopg://...`, or `sqlite:///path`; none: a SQLite database in `data_dir`. Several may share one."""
    files_url: str | None = None
    """Where files are kept, as fsspec takes it (`s3://bucket/folder`); none: a directory in `data_dir`."""
    webhook_secret: str | None = None
    """What webhooks are signed with, `whsec_` and base64; none: drawn once and kept in `data_dir`."""
    webhook_allowed_hosts: str = ""
    """Names and networks, separated by commas, that webhooks may be sent to though they are not public."""
    max_batch_lines: int = Field(default=50_000, ge=1)
    """Most requests in one batch."""
    max_file_bytes: ByteSize = Field(default=ByteSize(200 * 2**20), gt=0)
    """Largest uploaded file, bytes."""
    max_unfinished_batches: int = Field(default=10_000, ge=1)
    """Batches and jobs of one tenant that may be unfinished at once; beyond it 429."""
    max_unfinished_lines: int = Field(default=1_000_000, ge=1)
    """Requests of one tenant's batches that may be left to do at once; beyond it 429."""
    job_lease_s: float = Field(default=10.0, gt=0)
    """A jobs process that is silent for so long is taken for dead, seconds: what it was doing is done again."""
    keep_results_s: float = Field(default=30 * 86_400.0, gt=0)
    """Jobs and prompt batches are forgotten so long after they have ended, seconds; files are kept."""
    cpus_per_jobs: float = Field(default=0.0, ge=0)
    """CPUs that Ray reserves for the jobs process."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_none(cls, value: object, info: ValidationInfo) -> object:
        """The word `none` means None wherever a field may be that, as `key=value` has no other way to say it."""
        may_be_none = info.field_name is not None and _may_be_none(cls.model_fields[info.field_name])
        return None if may_be_none and isinstance(value, str) and value.lower() == "none" else value

    @field_validator("model", "api_key_file")
    @classmethod
    def _make_absolute(cls, value: str | None) -> str | None:
        """A path that exists here is made absolute: replicas run in other directories."""
        if value is not None and Path(value).expanduser().exists():
            return str(Path(value).expanduser().resolve())
        return value

    @field_validator("webhook_allowed_hosts")
    @classmethod
    def _check_allowed_hosts(cls, value: str) -> str:
        AllowedHosts.parse(entry.strip() for entry in value.split(",") if entry.strip())
        return value

    @field_validator("data_dir")
    @classmethod
    def _make_data_dir_absolute(cls, value: str) -> str:
        return str(Path(value).expanduser().resolve())

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must exceed max_num_seqs "
                f"({self.max_num_seqs}), or no prompt could begin while all running sequences decode"
            )
        if not self.fewest_replicas <= self.num_replicas <= self.most_replicas:
            raise ValueError(
                f"num_replicas ({self.num_replicas}), to start with, must be at least min_replicas "
                f"({self.fewest_replicas}) and at most max_replicas ({self.most_replicas})"
            )
        if self.batch_drain_s < self.target_drain_s:
            raise ValueError(
                f"batch_drain_s ({self.batch_drain_s:g}) must be at least target_drain_s ({self.target_drain_s:g})"
            )
        if self.device == "cpu" and self.num_gpus_per_replica:
            raise ValueError(
                f"device (cpu) and num_gpus_per_replica ({self.num_gpus_per_replica:g}) contradict each other"
            )
        if self.device == "cpu" and self.attention_backend in ("flash", "triton"):
            raise ValueError(f"device (cpu) and attention_backend ({self.attention_backend}) contradict each other")
        if self.device == "cpu" and self.compile_layers:
            raise ValueError("device (cpu) and compile_layers (true) contradict each other")
        if self.device == "cuda" and self.num_gpus_per_replica == 0:
            raise ValueError("device (cuda) and num_gpus_per_replica (0) contradict each other")
        return self

    @property
    def model_path(self) -> str:
        """Directory or hub id of the model, the demo's directory where none is given."""
        return self.model if self.model is not None else str(_DEMO_MODEL_DIRECTORY)

    @property
    def model_name(self) -> str:
        """The name clients ask for."""
        if self.served_model_name is not None:
            return self.served_model_name
        if self.model is None:
            return DEMO_MODEL_NAME
        return Path(self.model).name if Path(self.model).is_dir() else self.model

    @property
    def jobs_database_url(self) -> str:
        """Where files, batches and jobs are recorded."""
        return self.database_url or f"sqlite:///{self.data_dir}/jobs.sqlite3"

    @property
    def jobs_files_url(self) -> str:
        """Where the bytes of files are."""
        return self.files_url or f"{self.data_dir}/files"

    @property
    def fewest_replicas(self) -> int:
        """The bound below for the number of model replicas."""
        return self.num_replicas if self.min_replicas is None else self.min_replicas

    @property
    def most_replicas(self) -> int:
        """The bound above for the number of model replicas."""
        return self.num_replicas if self.max_replicas is None else self.max_replicas

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of model replicas follows the load."""
        return self.fewest_replicas < self.most_replicas

    @property
    def max_queued_requests_per_replica(self) -> int:
        """What waits in an engine: what each ingress may send before it hears of the others, and what is preempted.

        The jobs process is one more ingress.

        Requests wait in the ingress; a replica that has more than this gives them back.
        """
        return self.max_num_seqs * (self.num_ingress_replicas + 2) * len(Band)

    @property
    def max_ongoing_requests_per_replica(self) -> int:
        """More calls than the engine can hold, so that it is the engine that refuses."""
        return self.max_num_seqs + self.max_queued_requests_per_replica + _CONTROL_CALLS

    @property
    def max_ongoing_requests_per_ingress(self) -> int:
        """More calls than all replicas can hold, so that Serve's proxy never queues ahead of them."""
        waiting = self.max_queued_requests * (len(Band) - 1) + self.max_queued_batch_requests
        return self.max_ongoing_requests_per_replica * self.most_replicas + waiting + _CONTROL_CALLS

    def flow_limits(self) -> FlowLimits:
        """What may wait in an ingress, and how long."""
        usual = BandLimits(self.max_queued_requests, self.max_queued_tokens)
        batch = BandLimits(self.max_queued_batch_requests, self.max_queued_batch_tokens)
        return FlowLimits(
            bands={
                Band.INTERACTIVE: replace(usual, max_wait_s=self.max_interactive_wait_s),
                Band.STANDARD: replace(usual, max_wait_s=self.max_standard_wait_s),
                Band.BATCH: batch,
            },
            promote_after_s=_PROMOTE_SHARE * self.max_starvation_s,
            max_wait_s=self.max_queue_wait_s,
            lookahead=_LOOKAHEAD,
            num_bound_early=self.num_bound_early,
        )

    def latency_targets(self) -> dict[Band, LatencyTargets]:
        """How soon each band's requests should be answered."""
        return {
            Band.INTERACTIVE: LatencyTargets(self.interactive_ttft_target_s, self.interactive_tpot_target_s),
            Band.STANDARD: LatencyTargets(self.standard_ttft_target_s, self.standard_tpot_target_s),
            Band.BATCH: LatencyTargets(self.batch_ttft_target_s, self.batch_tpot_target_s),
        }

    def autoscaling_settings(self) -> AutoscalingSettings:
        """How the number of model replicas follows the load."""
        return AutoscalingSettings(
            min_replicas=self.fewest_replicas,
            max_replicas=self.most_replicas,
            num_replicas=self.num_replicas,
            target_drain_s=self.target_drain_s,
            batch_drain_s=self.batch_drain_s,
            downscale_delay_s=self.downscale_delay_s,
            scale_to_zero_delay_s=self.scale_to_zero_delay_s,
            replica_tokens_per_s=self.replica_tokens_per_s,
        )

    def allowed_webhook_hosts(self) -> AllowedHosts:
        """Where webhooks may go though it is not public."""
        return AllowedHosts.parse(entry.strip() for entry in self.webhook_allowed_hosts.split(",") if entry.strip())

    def jobs_settings(self) -> JobsSettings:
        """What the jobs deployment is told."""
        return JobsSettings(
            model_name=self.model_name,
            max_batch_lines=self.max_batch_lines,
            max_file_bytes=int(self.max_file_bytes),
            max_line_bytes=int(self.max_body_bytes),
            max_batches_per_tenant=self.max_unfinished_batches,
            max_lines_per_tenant=self.max_unfinished_lines,
            lease_s=self.job_lease_s,
            keep_results_s=self.keep_results_s,
        )

    def replica_options(self) -> ReplicaOptions:
        """What a model replica is told."""
        from replicas.model_replica import ReplicaOptions  # brings torch: seconds that only a replica should spend

        return ReplicaOptions(
            model=self.model_path,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            async_scheduling=self.async_scheduling,
            enforce_eager=self.enforce_eager,
            compile_layers=self.compile_layers,
            target_itl_ms=self.target_itl_ms,
            max_num_partial_prefills=self.max_num_partial_prefills,
            enable_prefix_caching=self.enable_prefix_caching,
            kv_pressure_policy=self.kv_pressure_policy,
            max_queued_requests=self.max_queued_requests_per_replica,
            max_queued_tokens=self.max_queued_tokens,
            promote_after_s=_PROMOTE_SHARE * self.max_starvation_s,
            kv_cache_bytes=int(self.kv_cache_bytes),
            gpu_memory_utilization=self.gpu_memory_utilization,
            attention_backend=self.attention_backend,
            num_threads=self.num_threads or max(1, int(self.cpus_per_replica)),
            kernel_directory=self.kernel_cache_dir,
            quantization=self.quantization,
            coalesce_interval_s=self.coalesce_interval_s,
            coalesce_tokens=self.coalesce_tokens,
            max_deltas_per_s=self.max_deltas_per_s,
        )


def _may_be_none(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)
