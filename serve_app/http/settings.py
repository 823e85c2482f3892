"""Settings of the HTTP layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.settings import check_bounds, setting
from serve_app.openai.request.settings import RequestLimits


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """Settings of one HTTP ingress; constant over its life."""

    model: str
    """Directory or hub id of the tokenizer and the chat template."""
    served_model_name: str
    """Name of the model in requests and responses."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    api_key_file: str | None = setting(None)
    """File of API keys. None: every client is anonymous and may use every band."""
    allowed_hosts: str = setting("*")
    """`Host` headers that are answered, separated by commas: names and addresses without ports, IPv6 in brackets,
    `*.name` for subdomains, `*` for all; any other gets 403. On a loopback address `make serve` sets this machine's
    loopback names, so that no web page reaches the server by DNS rebinding."""
    max_body_bytes: int = setting(8 * 2**20, gt=0)
    """Largest size of a JSON request body and of a line in a batch file, bytes; a larger body gets 413."""
    upload_timeout_s: float = setting(60.0, gt=0)
    """Longest time for the arrival of a request body, seconds; then 408. For a file the time grows with its size."""
    num_tokenizer_threads: int = setting(2, ge=1)
    """Threads of an ingress that parse large bodies, render chat templates and tokenize; work beyond them waits."""
    max_header_wait_s: float = 5.0
    """Longest wait of a stream's status for its first delta, seconds, so that an early failure gets its own status.
    Half a client's read time-out replaces a longer wait, but no less than half a second."""
    keep_alive_s: float = setting(10.0, gt=0)
    """Longest silence on a stream, seconds; then a comment is sent. Half a client's read time-out replaces a longer
    silence, but no less than half a second."""
    stall_timeout_s: float = setting(60.0, gt=0)
    """Seconds without a report after which a replica with running or waiting sequences counts as stalled."""
    server_sets_request_id: bool = False
    """True: the HTTP server, as Ray Serve's does, writes the request's `x-request-id` on every response. False: this
    application writes it."""

    def __post_init__(self) -> None:
        check_bounds(self)
