"""Configuration: the settings of all parts and of the deployment, read and checked once at start-up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from replicas.engine.config import GPU_BATCHED_TOKENS, GPU_SEQS, LOWERED_LIMITS, EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from replicas.protocol import Band
from replicas.settings import settings_of
from router.flow.flow_control import FlowLimits
from router.flow.flow_queue import BandLimits
from router.scaling.autoscaling import AutoscalingSettings, DownscaleDelay, ReplicaBounds
from router.watch import WatchSettings
from serve_app.http.settings import IngressSettings
from serve_app.jobs.api.records import JobsSettings
from serve_app.jobs.webhooks.addresses import AllowedHosts
from serve_app.models.default_model import DEFAULT_MODEL_NAME
from serve_app.openai.request.sampling_defaults import SamplingDefaults
from serve_app.openai.request.validation import RequestLimits
from serve_app.settings.by_band import BandQueues, BandTargets, BandWaits, read_downscale_delay
from serve_app.settings.processes import IngressProcess, JobsProcess, LineSettings, ModelProcess, RoutingSettings
from serve_app.settings.replaced import refuse_replaced
from serve_app.settings.vllm_options import read_count, read_vllm_options
from serve_app.tracing.settings import TracingSettings

Part = TypeVar("Part")

DEMO_MODEL_NAME = "headway-demo"
STREAM_DRAIN_S = 600.0
"""Default of `stream_drain_s`."""

PARTS = (
    ModelOptions,
    RunnerOptions,
    EngineLimits,
    StreamOptions,
    FlowLimits,
    WatchSettings,
    AutoscalingSettings,
    IngressSettings,
    RequestLimits,
    JobsSettings,
    TracingSettings,
)
"""Dataclasses that declare settings. Each `setting` of theirs is a field of `HeadwayConfig` with the same name."""

_DEMO_MODEL_DIRECTORY = Path(__file__).resolve().parents[1] / "replicas" / "demo"

_NUM_KNOWN_INGRESSES = 8
_PROMOTE_SHARE = 0.75
"""Share of `max_starvation_s` after which a request is promoted. The rest is for waiting for a free slot and computing
the prompt."""
_LOOKAHEAD = 1
"""Requests of a band that wait in a replica for its next free slot. Without them the slot would stay empty until the
ingress learns that it is free."""

_STALL_SILENCES = 12
"""Number of `max_replica_silence_s` after which a replica with streams counts as stalled. Most streams have left it by
then; those of the only replica have not."""
_CONTROL_CALLS = 64
"""Calls that a replica may hold in addition to its requests: polls, health checks, metrics, channels, ending calls."""

_PLAIN = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
_Bytes = Annotated[ByteSize, AfterValidator(int)]
"""A number of bytes, also with a unit."""
_TEXT = (PlainSerializer(str), WithJsonSchema({"type": "string"}))
_Targets = Annotated[BandTargets, PlainValidator(BandTargets.read), *_TEXT]
_Queues = Annotated[BandQueues, PlainValidator(BandQueues.read), *_TEXT]
_Waits = Annotated[BandWaits, PlainValidator(BandWaits.read), *_TEXT]
_READ = {DownscaleDelay: Annotated[DownscaleDelay, PlainValidator(read_downscale_delay), *_TEXT]}
"""Types of settings of the parts that are read from a text, by their own type."""


def _fields_of_parts() -> dict[str, Any]:
    """Make a pydantic field of each setting: its type, default, bounds and description."""
    every: Any = {part.__name__: (part, ...) for part in PARTS}
    schema = create_model("Parts", __config__=_PLAIN, **every).model_json_schema()["$defs"]
    made: dict[str, Any] = {}
    for part in PARTS:
        types, texts = get_type_hints(part), schema[part.__name__]["properties"]
        for name, (default, bounds) in settings_of(part).items():
            value_type = _Bytes if name.endswith("_bytes") else _READ.get(types[name], types[name])
            made[name] = (value_type, Field(default, description=texts[name]["description"], **bounds))
    return made


if TYPE_CHECKING:
    _SettingsOfParts = BaseModel  # the code reads settings from the parts, whose types are known
else:
    _SettingsOfParts = create_model("_SettingsOfParts", __config__=_PLAIN, **_fields_of_parts())


class HeadwayConfig(_SettingsOfParts):
    """Configuration of the application; each field may be given as `key=value` to `serve run`.

    Declares the fields of the deployment itself. All others are the settings of `PARTS`, declared there, which methods
    such as `replica_options` compose. The defaults serve the default model on one machine without a GPU.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    model: str | None = DEFAULT_MODEL_NAME
    """Directory, GGUF file or hub id of the model. Each node fetches the default model once, by its name. None
    or `headway-demo`: the bundled demo model, a toy for tests. Each node converts a GGUF file once, into its cache of
    models."""
    served_model_name: str | None = Field(default=None, pattern=r"[^,\s]")
    """Name of the model in requests and responses. Several, separated by commas or spaces, are all accepted in
    requests; the first is in responses. None: the name of the directory or file, or the hub id."""

    num_replicas: int = Field(default=1, ge=1)
    """Model replicas at the start, each a process with its own copy of the model."""
    min_replicas: int | None = Field(default=None, ge=0)
    """Fewest model replicas. None: `num_replicas`; 0: no replica runs while there is no work."""
    max_replicas: int | None = Field(default=None, ge=1)
    """Most model replicas; their number follows the load if this exceeds the fewest. None: with GPUs as many as the
    cluster's GPUs are enough for, without GPUs `num_replicas`."""
    num_gpus_per_replica: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for a model replica; of less than 1, replicas share a GPU and its memory. None:
    `tensor_parallel_size` if the cluster has GPUs, else 0."""
    cpus_per_replica: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a model replica."""
    update: Literal["replace", "surge"] = "replace"
    """Order in which `serve deploy` replaces model replicas. replace: a replica stops, then a new one starts in its
    place, one after another; requests to a single replica wait. surge: a replica stops when its new one is ready, which
    needs room for at least one more."""
    graceful_shutdown_timeout_s: float = Field(default=20.0, gt=0)
    """Time that running requests have to finish when a model replica or the server is stopped, seconds."""
    stream_drain_s: float = Field(default=STREAM_DRAIN_S, gt=0)
    """Time that running requests have to finish in an ingress that is removed, seconds; then they end with an error. A
    process of HAProxy that another has replaced cuts its connections 10 s later."""
    health_check_timeout_s: float = Field(default=3.0, gt=0)
    """Seconds after which an unanswered health check has failed; three failures replace the replica."""

    max_queue: _Queues = BandQueues()
    """Most sequences of each band that wait in one ingress, and most tokens of them, prompt and expected output; beyond
    either 429. Its forms are those of `slo`."""
    max_tenant_queue_share: float = Field(default=0.5, gt=0, le=1)
    """Most of a band's queue, in requests and in tokens, that one tenant may fill, as a share; beyond it 429. It needs
    `api_key_file`: without keys all requests are of one tenant, or of as many as clients name."""
    max_starvation_s: float = Field(default=30.0, gt=0)
    """Longest time that a waiting band goes without a first token, seconds, while replicas finish sequences."""
    max_wait_s: _Waits = BandWaits()
    """Longest predicted wait of a request of each band, seconds; beyond it 429. None: it waits. Its forms are those of
    `slo`."""

    num_ingress_replicas: int = Field(default=1, ge=1)
    """HTTP ingress processes, at the start if their number follows the load."""
    min_ingress_replicas: int | None = Field(default=None, ge=1)
    """Fewest ingress processes. None: `num_ingress_replicas`."""
    max_ingress_replicas: int | None = Field(default=None, ge=1)
    """Most ingress processes. If this exceeds the fewest, their number follows their load: more start above 200
    requests or 0.7 cores of processor time each. None: `num_ingress_replicas`."""
    cpus_per_ingress: float = Field(default=0.0, ge=0)
    """CPUs that Ray reserves for an ingress replica."""
    slo: _Targets = BandTargets()
    """Targets of each band for the time to first token and for the mean time between output tokens, seconds; either may
    be none. In YAML `{interactive: [1, 0.06], batch: none}`. Bands that are not named keep their defaults. While the
    mean time between tokens of a band's streams in a replica exceeds its target, less urgent bands decode and
    prefill fewer tokens in a step; they keep their slots. A replica aims at no less than 1.5 times the time that the
    streams have without less urgent work, and 1.2 times beside prompts and texts alone. `auto` is 0.06 with a GPU, else
    just these times. Targets neither refuse nor order
    requests; `headway:slo_attained_total` and `headway:goodput_tokens_total` count what met them."""
    load_poll_period_s: float = Field(default=1.0, gt=0)
    """Seconds between two polls of every model replica's load by an ingress."""

    data_dir: str = Field(default="~/.headway", validate_default=True)
    """Directory for the jobs' database, files and webhook secret, unless the next three fields say otherwise. If it and
    `database_url` are not given, `headway serve` uses one in `~/.headway/servers` while another server has the default
    one."""
    database_url: str | None = None
    """Database of jobs: `postgresql+psycopg://...` or `sqlite:///path`. None: a SQLite database in `data_dir`. Several
    applications may share one."""
    num_jobs_workers: int = Field(default=1, ge=1)
    """Processes that run lines of batches and jobs, send webhooks and answer for them. More than 1 need PostgreSQL."""
    files_url: str | None = None
    """fsspec URL of the folder for files (`s3://bucket/folder`). None: a directory in `data_dir`."""
    webhook_secret: str | None = None
    """Key that signs webhooks, `whsec_` and base64; the key of encrypted contents follows from it. None: drawn once and
    kept in `data_dir`."""
    webhook_allowed_hosts: str = ""
    """Host names and networks, separated by commas, that may receive webhooks although they are not public."""
    cpus_per_jobs: float = Field(default=0.0, ge=0)
    """CPUs that Ray reserves for a jobs worker."""

    @model_validator(mode="before")
    @classmethod
    def _read_other_names(cls, given: object) -> object:
        """Refuse former settings, and read options of vLLM's: each refusal says what takes its place."""
        if not isinstance(given, dict):
            return given
        refuse_replaced(given)
        return read_vllm_options(given)

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: object, info: ValidationInfo) -> object:
        """Read the texts of `key=value`: `none` where a field may be None, and `16k` where it may be a whole number."""
        if not isinstance(value, str) or info.field_name is None:
            return value
        annotation = cls.model_fields[info.field_name].annotation
        types = (annotation, *get_args(annotation))
        if type(None) in types and value.lower() == "none":
            return None
        count = read_count(value) if int in types else None
        return value if count is None else count

    @field_validator("served_model_name")
    @classmethod
    def _separate_names(cls, value: str | None) -> str | None:
        return value and ",".join(dict.fromkeys(value.replace(",", " ").split()))

    @field_validator("model")
    @classmethod
    def _read_demo(cls, value: str | None) -> str | None:
        return None if value == DEMO_MODEL_NAME else value

    @field_validator("model", "api_key_file", "chat_template", "generation_config")
    @classmethod
    def _make_absolute(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Make an existing path absolute: replicas run in other working directories."""
        is_word = info.field_name == "generation_config" and value in SamplingDefaults.SOURCES
        if value is not None and not is_word and Path(value).expanduser().exists():
            return str(Path(value).expanduser().resolve())
        return value

    @field_validator("webhook_allowed_hosts")
    @classmethod
    def _check_allowed_hosts(cls, value: str) -> str:
        AllowedHosts.parse(value)
        return value

    @field_validator("data_dir")
    @classmethod
    def _make_data_dir_absolute(cls, value: str) -> str:
        return str(Path(value).expanduser().resolve())

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.replica_bounds()
        self.autoscaling_settings()
        self.ingress_settings()
        if not self.fewest_ingresses <= self.num_ingress_replicas <= self.most_ingresses:
            raise ValueError(
                f"num_ingress_replicas ({self.num_ingress_replicas}) must be from min_ingress_replicas "
                f"({self.fewest_ingresses}) to max_ingress_replicas ({self.most_ingresses})"
            )
        if self.num_jobs_workers > 1 and not self.jobs_database_url.startswith("postgresql"):
            raise ValueError(
                f"num_jobs_workers ({self.num_jobs_workers}) must be 1 unless database_url is PostgreSQL's"
            )
        options = self.replica_options()
        device, backend = options.model.device, options.runner.attention_backend
        if device == "cpu" and self.num_gpus_per_replica:
            raise ValueError(
                f"device (cpu) and num_gpus_per_replica ({self.num_gpus_per_replica:g}) contradict each other"
            )
        if device == "cpu" and backend in ("flash", "triton"):
            raise ValueError(f"device (cpu) and attention_backend ({backend}) contradict each other")
        if backend == "flash" and options.runner.kv_cache_dtype != "auto":
            raise ValueError(
                f"attention_backend ({backend}) and kv_cache_dtype ({options.runner.kv_cache_dtype}) contradict each "
                "other"
            )
        if device == "cpu" and options.model.compile_layers:
            raise ValueError("device (cpu) and compile_layers (true) contradict each other")
        if options.model.batch_invariant and backend in ("flash", "gather"):
            raise ValueError(f"batch_invariant (true) and attention_backend ({backend}) contradict each other")
        if options.model.batch_invariant and options.model.quantization == "fp8_w8a8":
            raise ValueError("batch_invariant (true) and quantization (fp8_w8a8) contradict each other")
        if device == "cuda" and self.num_gpus_per_replica == 0:
            raise ValueError("device (cuda) and num_gpus_per_replica (0) contradict each other")
        num_ranks = options.model.tensor_parallel_size
        if num_ranks > 1 and self.num_gpus_per_replica and self.num_gpus_per_replica != num_ranks:
            raise ValueError(
                f"tensor_parallel_size ({num_ranks}) and num_gpus_per_replica ({self.num_gpus_per_replica:g}) "
                "contradict each other: each rank has a GPU of its own"
            )
        return self

    @property
    def model_path(self) -> str:
        """Directory or hub id of the model, or the directory of the bundled demo."""
        return self.model if self.model is not None else str(_DEMO_MODEL_DIRECTORY)

    @property
    def is_toy_model(self) -> bool:
        """True if the model is the bundled demo, whose answers are of no use."""
        return self.model is None

    @property
    def model_name(self) -> str:
        """Name of the model in responses."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model that requests may use."""
        return (self._name_of_model,) if self.served_model_name is None else tuple(self.served_model_name.split(","))

    @property
    def _name_of_model(self) -> str:
        """Name of the model if `served_model_name` gives it no other."""
        if self.model is None:
            return DEMO_MODEL_NAME
        path = Path(self.model)
        if path.suffix == ".gguf":
            return path.stem
        return path.name if path.is_dir() else self.model

    @property
    def jobs_database_url(self) -> str:
        """URL of the database of files, batches and jobs."""
        return self.database_url or f"sqlite:///{self.data_dir}/jobs.sqlite3"

    @property
    def jobs_files_url(self) -> str:
        """URL of the folder that holds the bytes of files, for fsspec."""
        return self.files_url or f"{self.data_dir}/files"

    def model_process(self) -> ModelProcess:
        """Compose the settings of a model replica."""
        replica = self.replica_options().with_gpus(self.num_gpus_per_replica or 0.0)
        return ModelProcess(self._name_of_model, replica, self.load_poll_period_s)

    def ingress_process(
        self, access_log_socket: str | None = None, ray_dashboard_url: str | None = None
    ) -> IngressProcess:
        """Compose the settings of an ingress.

        It sends access lines to the given Unix socket, and its pages link to Ray's dashboard; None: it does not.
        """
        http = replace(
            self.ingress_settings(), access_log_socket=access_log_socket, ray_dashboard_url=ray_dashboard_url
        )
        return IngressProcess(
            routing=self.routing_settings(),
            http=http,
            jobs=self.jobs_settings(),
            files_url=self.jobs_files_url,
            webhook_allowed_hosts=self.webhook_allowed_hosts,
        )

    def jobs_process(self) -> JobsProcess:
        """Compose the settings of a jobs worker."""
        http = self.ingress_settings()
        return JobsProcess(
            routing=self.routing_settings(),
            jobs=self.jobs_settings(),
            lines=LineSettings(
                http.model,
                http.limits,
                http.num_tokenizer_threads,
                http.work_limits,
                http.tool_call_parser,
                http.chat_template,
            ),
            tracing=self.tracing_settings(),
            data_dir=self.data_dir,
            database_url=self.jobs_database_url,
            files_url=self.jobs_files_url,
            webhook_secret=self.webhook_secret,
            webhook_allowed_hosts=self.webhook_allowed_hosts,
        )

    def routing_settings(self) -> RoutingSettings:
        """Compose the settings of the router in an ingress or a jobs worker."""
        return RoutingSettings(
            model_name=self.model_name,
            flow=self.flow_limits(),
            watch=self.watch_settings(),
            autoscaling=self.autoscaling_settings(),
            targets=self.slo.by_band(),
            has_prefix_cache=self.engine_limits().enable_prefix_caching,
        )

    def replica_bounds(self) -> ReplicaBounds:
        """Return the bounds on the number of model replicas, which may change while the processes run."""
        return ReplicaBounds(self.effective_min_replicas, self.effective_max_replicas, self.num_replicas)

    @property
    def effective_min_replicas(self) -> int:
        """Fewest model replicas."""
        return self.num_replicas if self.min_replicas is None else self.min_replicas

    @property
    def effective_max_replicas(self) -> int:
        """Most model replicas."""
        return self.num_replicas if self.max_replicas is None else self.max_replicas

    @property
    def is_autoscaled(self) -> bool:
        """True if the number of model replicas follows the load."""
        return self.effective_min_replicas < self.effective_max_replicas

    @property
    def fewest_ingresses(self) -> int:
        """Fewest ingress processes."""
        return self.num_ingress_replicas if self.min_ingress_replicas is None else self.min_ingress_replicas

    @property
    def most_ingresses(self) -> int:
        """Most ingress processes."""
        return self.num_ingress_replicas if self.max_ingress_replicas is None else self.max_ingress_replicas

    @property
    def max_known_ingresses(self) -> int:
        """Ingresses whose requests a model replica has room for: 8, 16 and so on. A second jobs worker counts as one.

        More ingresses than there are now, so that a change of their number replaces no model replica.
        """
        num_ingresses = _NUM_KNOWN_INGRESSES
        while num_ingresses < self.most_ingresses + self.num_jobs_workers - 1:
            num_ingresses *= 2
        return num_ingresses

    @property
    def max_queued_requests_per_replica(self) -> int:
        """Most sequences that wait in an engine; a replica returns further ones to their ingress.

        In each band, every ingress and jobs worker may fill all slots before it learns of the others' requests. As
        many more sequences may be preempted ones.
        """
        return self._max_num_seqs * (self.max_known_ingresses + 2) * len(Band)

    @property
    def max_ongoing_requests_per_replica(self) -> int:
        """Most calls to one model replica; above its engine's limits, so that the engine and not Serve refuses."""
        return self._max_num_seqs + self.max_queued_requests_per_replica + _CONTROL_CALLS

    @property
    def max_ongoing_requests_per_ingress(self) -> int:
        """Most calls to one ingress; above the capacity of all queues, so that Serve's proxy never queues requests."""
        waiting = sum(limit.max_requests for limit in self.max_queue.by_band().values())
        return self.max_ongoing_requests_per_replica * self.effective_max_replicas + waiting + _CONTROL_CALLS

    @property
    def max_ongoing_requests_for_jobs(self) -> int:
        """Most calls to a jobs worker; above the requests in all ingresses, so that long polls block no call."""
        return self.max_ongoing_requests_per_ingress * self.most_ingresses + _CONTROL_CALLS

    def flow_limits(self) -> FlowLimits:
        """Compose the limits of the requests that wait in an ingress."""
        waits = self.max_wait_s.by_band()
        return self._part(
            FlowLimits,
            bands={
                band: BandLimits(limit.max_requests, limit.max_tokens, waits[band], self._tenant_share)
                for band, limit in self.max_queue.by_band().items()
            },
            promote_after_s=_PROMOTE_SHARE * self.max_starvation_s,
            lookahead=_LOOKAHEAD,
        )

    def autoscaling_settings(self) -> AutoscalingSettings:
        """Compose the settings of the autoscaler."""
        return self._part(AutoscalingSettings)

    def watch_settings(self) -> WatchSettings:
        """Compose the settings of an ingress's polls, and of the streams that leave a replica."""
        return self._part(WatchSettings, poll_period_s=self.load_poll_period_s)

    def jobs_settings(self) -> JobsSettings:
        """Compose the settings of a jobs worker."""
        max_body_bytes = self.ingress_settings().max_body_bytes
        return self._part(
            JobsSettings, model_name=self.model_name, aliases=self.model_names[1:], max_line_bytes=max_body_bytes
        )

    def ingress_settings(self) -> IngressSettings:
        """Compose the settings of an HTTP ingress."""
        return self._part(
            IngressSettings,
            model=self.model_path,
            is_toy_model=self.is_toy_model,
            served_model_name=self.model_name,
            aliases=self.model_names[1:],
            limits=self._part(RequestLimits),
            tracing=self.tracing_settings(),
            server_sets_request_id=True,
            max_queued_preparations=self.max_queue.interactive.max_requests,
            max_tenant_share=self._tenant_share,
            stall_timeout_s=_STALL_SILENCES * self.watch_settings().max_replica_silence_s,
        )

    def tracing_settings(self) -> TracingSettings:
        """Compose the settings of traces."""
        return self._part(TracingSettings)

    def engine_limits(self) -> EngineLimits:
        """Compose the limits of a replica's engine."""
        lowered = set(LOWERED_LIMITS) - self.model_fields_set if self.num_gpus_per_replica else ()
        return self._part(
            EngineLimits,
            **self._step_limits(),
            lowered=frozenset(lowered),
            max_queued_requests=self.max_queued_requests_per_replica,
            max_queued_tokens=max(self.max_queue.interactive.max_tokens, self.max_queue.standard.max_tokens),
            promote_after_s=_PROMOTE_SHARE * self.max_starvation_s,
            tpot_targets_s=tuple(targets.tpot_s for targets in self.slo.by_band().values()),
        )

    def replica_options(self) -> ReplicaOptions:
        """Compose the options of a model replica."""
        model = self._part(ModelOptions, path=self.model_path)
        if model.num_threads is None:
            model = replace(model, num_threads=max(1, int(self.cpus_per_replica) // model.tensor_parallel_size))
        return ReplicaOptions(model, self._part(RunnerOptions), self.engine_limits(), self._part(StreamOptions))

    @property
    def _tenant_share(self) -> float:
        """Share of a queue that one tenant may fill."""
        has_keys: bool = getattr(self, "api_key_file") is not None  # noqa: B009  # a field of one of the parts
        return self.max_tenant_queue_share if has_keys else 1.0

    @property
    def _max_num_seqs(self) -> int:
        return self._step_limits()["max_num_seqs"]

    def _step_limits(self) -> dict[str, int]:
        """Return the limits of steps; those that are not given depend on the device."""
        limits, given = {name: getattr(self, name) for name in LOWERED_LIMITS}, self.model_fields_set
        if self.num_gpus_per_replica and "max_num_batched_tokens" not in given:
            limits["max_num_batched_tokens"] = GPU_BATCHED_TOKENS
        if self.num_gpus_per_replica and "max_num_seqs" not in given:
            limits["max_num_seqs"] = min(GPU_SEQS, max(1, limits["max_num_batched_tokens"] - 1))
        return limits

    def _part(self, part: type[Part], **given: object) -> Part:
        """Make one of `PARTS` from its settings and the given values of its other fields, or in place of settings."""
        return part(**{name: getattr(self, name) for name in settings_of(part)} | given)
