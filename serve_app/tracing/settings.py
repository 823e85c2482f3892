"""Settings of traces."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from replicas.settings import check_bounds, setting

_TRACES_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Settings of traces; constant over a process's life."""

    otlp_traces_endpoint: str | None = setting(None)
    """URL of the OTLP receiver of traces (OpenTelemetry), over HTTP with protobuf, such as
    `http://localhost:4318/v1/traces`; the path is added if there is none. None: nothing is traced."""
    trace_sampling_ratio: float = setting(1.0, ge=0, le=1)
    """Share of the requests without a `traceparent` that are traced. With one, the caller has decided."""
    trace_prompts: bool = setting(False)
    """True: a span has the messages or the prompt of its request (`gen_ai.input.messages`). False: no span has text of
    a prompt."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.otlp_traces_endpoint is None:
            return
        parts = urlsplit(self.otlp_traces_endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"otlp_traces_endpoint is `{self.otlp_traces_endpoint}`; it must be a URL such as "
                f"http://localhost:4318{_TRACES_PATH}"
            )

    @property
    def url(self) -> str | None:
        """URL to which traces are posted; None: nothing is traced."""
        if self.otlp_traces_endpoint is None:
            return None
        parts = urlsplit(self.otlp_traces_endpoint)
        return parts._replace(path=_TRACES_PATH if parts.path in ("", "/") else parts.path).geturl()
