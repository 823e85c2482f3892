"""Caller of a request, and the band, deadline and tenant that its headers and its body ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replicas.errors import InvalidRequest
from replicas.protocol import Band
from router.timeline import Timeline
from serve_app.errors import shortened
from serve_app.keys.authenticator import Principal
from serve_app.openai.request.pooled_schema import AnyBody

SDK_DEFAULT_TIMEOUT_S = 600.0
"""Time-out that the OpenAI SDKs send by default, seconds; it counts as none."""

_NOT_GIVEN = "NOT_GIVEN"
"""Time-out that Anthropic's Python client sends with a stream for which it has none."""

_BAND_OF_TIER = {
    "priority": Band.INTERACTIVE,
    "fast": Band.INTERACTIVE,
    "auto": Band.STANDARD,
    "default": Band.STANDARD,
    "scale": Band.STANDARD,
    "flex": Band.BATCH,
}
_TIER_OF_BAND = {Band.INTERACTIVE: "priority", Band.STANDARD: "default", Band.BATCH: "flex"}
_BAND_OF_NAME = {band.name.lower(): band for band in Band} | {str(band.value): band for band in Band}


@dataclass(frozen=True, slots=True)
class WorkOwner:
    """Band and tenant for which a worker thread works."""

    band: Band
    tenant: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request, with the urgency that its headers ask for; None: the header is not given."""

    request_id: str
    """Id that no other running request has; the ids of the sequences start with it."""
    arrival_unix_s: float
    principal: Principal
    requested_band: Band | None = None
    """Band from `x-headway-priority`, which holds a band's name or number."""
    timeout_s: float | None = None
    """Time-out from `request-timeout-ms`, seconds from the request's arrival; a later answer is useless."""
    sdk_timeout_s: float | None = None
    """Time-out of the SDK, seconds. Without streaming it bounds the whole answer. With streaming it bounds the time to
    the first byte and the gaps."""

    timeline: Timeline | None = None
    """Time of the request so far; None: it begins with the preparation."""

    @classmethod
    def of(
        cls, request_id: str, arrival_unix_s: float, principal: Principal, headers: Mapping[str, str],
        timeline: Timeline,
    ) -> Caller:  # fmt: skip
        """Return the sender of a request with these headers.

        Raises:
            InvalidRequest: a header has an invalid value.
        """
        band_name = headers.get("x-headway-priority")
        if band_name is not None and band_name.lower() not in _BAND_OF_NAME:
            accepted = ", ".join(_BAND_OF_NAME)
            raise InvalidRequest(
                f"header `x-headway-priority` is `{shortened(band_name)}`; it must be one of {accepted}",
                "x-headway-priority",
            )
        timeout_ms = _positive(headers, "request-timeout-ms")
        # openai-python sends the first header, openai-node the second in whole seconds: its "0" is less than a second.
        python_s, node_s = (_positive(headers, name) for name in ("x-stainless-read-timeout", "x-stainless-timeout"))
        sdk_timeout_s = python_s or node_s
        return cls(
            request_id,
            arrival_unix_s,
            principal,
            requested_band=None if band_name is None else _BAND_OF_NAME[band_name.lower()],
            timeout_s=None if timeout_ms is None else timeout_ms / 1000,
            sdk_timeout_s=None if sdk_timeout_s == SDK_DEFAULT_TIMEOUT_S else sdk_timeout_s,
            timeline=timeline,
        )

    def band_of(self, body: AnyBody) -> Band:
        """Return the band: `priority`, else the header, else `service_tier`, no more urgent than the ceiling."""
        if body.priority is not None:
            band = Band(body.priority)
        elif self.requested_band is not None:
            band = self.requested_band
        else:
            band = _BAND_OF_TIER[body.service_tier or "auto"]
        return max(band, self.principal.band_ceiling)

    @property
    def owner_before_parsing(self) -> WorkOwner:
        """Owner of the work on a body that has not been parsed: in the most urgent band that the body may ask for."""
        ceiling = self.principal.band_ceiling
        band = ceiling if self.requested_band is None else max(self.requested_band, ceiling)
        return WorkOwner(band, self.principal.tenant)

    def owner_of(self, body: AnyBody) -> WorkOwner:
        """Return the owner of the work on a body."""
        return WorkOwner(self.band_of(body), self.tenant_of(body))

    def background_band_of(self, body: AnyBody) -> Band:
        """Return the band of asynchronous work: `batch`, unless the request asks for another band."""
        is_explicit = body.priority is not None or self.requested_band is not None or body.service_tier is not None
        return self.band_of(body) if is_explicit else Band.BATCH

    def deadline_of(self, body: AnyBody) -> float | None:
        """Return the earliest deadline that the request names, unix seconds; None: it names none."""
        limits_s = [
            None if body.deadline_ms is None else body.deadline_ms / 1000,
            self.timeout_s,
            None if body.stream else self.sdk_timeout_s,
        ]
        given_s = [limit_s for limit_s in limits_s if limit_s is not None]
        return self.arrival_unix_s + min(given_s) if given_s else None

    def tenant_of(self, body: AnyBody) -> str:
        """Return the tenant for fair scheduling: the key's owner, or the user that an anonymous client names.

        A key's owner cannot enlarge its share by naming users.
        """
        if not self.principal.is_anonymous:
            return self.principal.tenant
        return body.user or body.safety_identifier or self.principal.tenant


def tier_of(band: Band) -> str:
    """Return OpenAI's service tier for a band."""
    return _TIER_OF_BAND[band]


def _positive(headers: Mapping[str, str], name: str) -> float | None:
    """Return the number in a header; None if the header is missing, 0 or infinite."""
    text = headers.get(name, _NOT_GIVEN)
    if text == _NOT_GIVEN:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise InvalidRequest(f"header `{name}` is `{shortened(text)}`; it must be a number, 0 or more", name)
    return value if 0 < value < float("inf") else None
