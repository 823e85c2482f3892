"""What the HTTP surface is told."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.openai.limits import RequestLimits


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """How one ingress behaves; constant over its life."""

    model: str
    """Directory or hub id the tokenizer and the chat template come from."""
    served_model_name: str
    """What clients call the model."""
    api_key_file: str | None = None
    """Key file as `serve_app.auth.Authenticator` reads it; None: nobody needs a key."""
    allowed_hosts: tuple[str, ...] = ("*",)
    """`Host` headers that are answered, as `AllowedHostsMiddleware` takes them."""
    max_body_bytes: int = 8 * 2**20
    """Largest body, bytes; beyond it 413."""
    max_prompts: int = 128
    """Most prompts of one completions request."""
    max_choices: int = 128
    """Most choices of one request: `n` times prompts."""
    max_logprobs: int = 20
    """Most likeliest tokens per position that a request may ask for."""
    upload_timeout_s: float = 60.0
    """Longest that a body may take to arrive, seconds; beyond it 408."""
    num_tokenizer_threads: int = 2
    """Threads that parse large bodies, render chat templates and tokenize; what does not fit waits its turn."""
    max_header_wait_s: float = 5.0
    """Longest that a stream's status waits for its first delta, seconds, so that early failures have one of their own.
    A client with a shorter read time-out is let wait half of that, but at least half a second."""
    keep_alive_s: float = 10.0
    """Longest silence on a stream, seconds, before a comment is sent.
    A client with a shorter read time-out gets one after half of that, but at most two in a second."""
    stall_timeout_s: float = 60.0
    """A replica with running sequences that has not been heard of for this long, seconds, is not live."""
    server_sets_request_id: bool = False
    """True: the HTTP server writes `x-request-id` on every response itself, the request's, as Ray Serve's does;
    False: this application does."""

    @property
    def limits(self) -> RequestLimits:
        """Most that one request may ask for."""
        return RequestLimits(max_prompts=self.max_prompts, max_choices=self.max_choices, max_logprobs=self.max_logprobs)
