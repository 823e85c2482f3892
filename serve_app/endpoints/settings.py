"""Settings of the HTTP layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.settings import check_bounds, setting
from serve_app.openai.settings import RequestLimits


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """Settings of one HTTP ingress; constant over its life."""

    model: str
    """Directory or hub id of the tokenizer and the chat template."""
    served_model_name: str
    """Name of the model in requests and responses."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    api_key_file: str | None = setting(None)
    """File of API keys; None: every client is anonymous and unlimited."""
    allowed_hosts: str = setting("*")
    """`Host` headers that are answered, separated by commas: names and addresses without ports, IPv6 in brackets,
    `*.name` for subdomains, `*` for all; any other gets 403. On a loopback address `make serve` sets this machine's
    loopback names, so that no web page reaches it by DNS rebinding."""
    max_body_bytes: int = setting(8 * 2**20, gt=0)
    """Size of the largest HTTP request body, bytes; a larger one gets 413."""
    upload_timeout_s: float = setting(60.0, gt=0)
    """Longest time for the arrival of a request body, seconds; then 408."""
    num_tokenizer_threads: int = setting(2, ge=1)
    """Threads of an ingress that parse large bodies, render chat templates and tokenize; other requests wait."""
    max_header_wait_s: float = 5.0
    """Longest wait of a stream's status for its first delta, seconds, so that early failures get a status of their own.
    For a client with a shorter read time-out it is half of that, but at least half a second."""
    keep_alive_s: float = setting(10.0, gt=0)
    """Longest silence on a stream, seconds; then a comment is sent. A client with a shorter read time-out gets one
    after half of that, but at most two in a second."""
    stall_timeout_s: float = setting(60.0, gt=0)
    """Seconds without a report after which a replica with running sequences no longer counts as live."""
    server_sets_request_id: bool = False
    """True: the HTTP server writes the request's `x-request-id` on every response itself, as Ray Serve's does; False:
    this application does."""

    def __post_init__(self) -> None:
        check_bounds(self)
