"""Settings of the HTTP layer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from replicas.settings import check_bounds, setting
from serve_app.openai.request.validation import RequestLimits
from serve_app.openai.tokenize.work_queue import WorkLimits
from serve_app.openai.tools.families import family_named
from serve_app.tracing.settings import TracingSettings

_QUEUED_BODIES = 32
"""Bodies of the largest size, whose bytes a band's bodies and texts may have that wait for a thread."""
_LOOPBACK = "loopback"
_LOOPBACK_ORIGIN = r"https?://(([a-z0-9-]+\.)*localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[a-z0-9._~%:\[\]-]+")


@dataclass(frozen=True, slots=True)
class AllowedOrigins:
    """Origins whose web pages may call this server."""

    names: frozenset[str]
    """Origins as browsers send them; `*` stands for all."""
    pattern: str | None
    """Regular expression of further origins; None: there are none."""

    @classmethod
    def parse(cls, text: str | None) -> AllowedOrigins:
        """Read the setting `allowed_origins`.

        Raises:
            ValueError: an entry is not an origin.
        """
        entries = {entry.strip().lower() for entry in (text or "").split(",")} - {""}
        names = frozenset(entries - {_LOOPBACK})
        for name in sorted(names):
            if not _ORIGIN.fullmatch(name):
                raise ValueError(
                    f"allowed_origins has `{name}`; an entry is scheme://host or scheme://host:port without a path, "
                    f"`{_LOOPBACK}`, `null` or `*`"
                )
        return cls(names, _LOOPBACK_ORIGIN if _LOOPBACK in entries else None)

    def allows(self, origin: str) -> bool:
        """Return True if the pages of `origin` may call this server."""
        if "*" in self.names or origin in self.names:
            return True
        return self.pattern is not None and re.fullmatch(self.pattern, origin) is not None


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """Settings of one HTTP ingress; constant over its life."""

    model: str
    """Directory or hub id of the tokenizer and the chat template."""
    served_model_name: str
    """Name of the model in requests and responses."""
    is_toy_model: bool = False
    """True if the answers are of no use, as of the bundled demo model; a header of each completion then says so."""
    aliases: tuple[str, ...] = ()
    """Further names that requests may use."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    api_key_file: str | None = setting(None)
    """File of API keys, which `headway keys` writes; a change is noticed within a second. None: every client is
    anonymous and may use every band."""
    allowed_hosts: str = setting("*")
    """`Host` headers that are answered, separated by commas: names and addresses without ports, IPv6 in brackets,
    `*.name` for subdomains, `*` for all; any other gets 403. On a loopback address `make serve` sets this machine's
    loopback names, so that no web page reaches the server by DNS rebinding."""
    allowed_origins: str | None = setting(_LOOPBACK)
    """Origins whose web pages may call this server (CORS), separated by commas: `scheme://host` or
    `scheme://host:port`, `loopback` for this machine's at any port, `null` for pages without an origin, such as local
    files, `*` for all. None: no other origin's pages."""
    max_body_bytes: int = setting(8 * 2**20, gt=0)
    """Largest size of a JSON request body and of a line in a batch file, bytes; a larger body gets 413."""
    upload_timeout_s: float = setting(60.0, gt=0)
    """Longest time for the arrival of a request body, seconds; then 408. For a file the time grows with its size."""
    num_tokenizer_threads: int = setting(2, ge=1)
    """Threads of an ingress that parse large bodies, render chat templates and tokenize. Work beyond them waits, in
    order of bands and fair between tenants. Bands below `interactive` leave one of several threads free for it. For
    each of the others there may be a process at low priority, which does the work of these bands from 16 KiB."""
    max_queued_preparations: int = 1024
    """Most bodies and texts of a band that wait for these threads in an ingress; then 429."""
    max_tenant_share: float = 1.0
    """Most of these bodies and texts, and of their bytes, that one tenant may fill, as a share."""
    chat_template: str | None = setting(None)
    """Chat template in place of the model's: a file of Jinja's, or the name of one of several that the model has. None:
    the model's, by default the one called `default`."""
    tool_call_parser: str | None = setting(None)
    """Family of the chat template, which decides the form of tool calls and reasoning: a name in docs/tools.md, such as
    hermes or llama3_json, as vLLM has them. None: the family is found from the template."""
    max_header_wait_s: float = 5.0
    """Longest wait of a stream's status for its first delta, seconds, so that an early failure gets its own status.
    Half a client's read time-out replaces a longer wait, but no less than half a second."""
    keep_alive_s: float = setting(10.0, gt=0)
    """Longest silence on a stream, seconds; then a comment is sent. Half a client's read time-out replaces a longer
    silence, but no less than half a second."""
    stall_timeout_s: float = 60.0
    """Seconds without a report after which a replica with running or waiting sequences counts as stalled."""
    slow_request_s: float | None = setting(60.0, gt=0)
    """Duration from which the log names a completion as slow, with the part of its time that took longest, seconds.
    None: it names none."""
    access_log_socket: str | None = None
    """Unix socket that gets one line of JSON for each finished request. `headway serve` sets it and prints the lines.
    None: the lines are only in the log files of Ray Serve."""
    ray_dashboard_url: str | None = None
    """Address of Ray's dashboard, to which the pages link. `headway serve` sets it. None: it is not known."""
    server_sets_request_id: bool = False
    """True: the HTTP server, as Ray Serve's does, writes the request's `x-request-id` on every response. False: this
    application writes it."""

    @property
    def work_limits(self) -> WorkLimits:
        """Limits of the work that waits for the threads: of each band as many bytes as a few of the largest bodies."""
        max_bytes = _QUEUED_BODIES * self.max_body_bytes
        return WorkLimits(self.max_queued_preparations, max_bytes, self.max_tenant_share)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first is in responses."""
        return (self.served_model_name, *self.aliases)

    def __post_init__(self) -> None:
        check_bounds(self)
        AllowedOrigins.parse(self.allowed_origins)
        if self.tool_call_parser is not None:
            family_named(self.tool_call_parser)

    @property
    def origins(self) -> AllowedOrigins:
        """Origins in `allowed_origins`."""
        return AllowedOrigins.parse(self.allowed_origins)
