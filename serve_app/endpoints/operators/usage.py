"""Endpoint of the usage: GET /v1/usage, as JSON or CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response

from replicas.errors import InvalidRequest
from replicas.timing.clock import Clock
from serve_app.errors import operator_key_required
from serve_app.http.exchange import exchange_of, json_response
from serve_app.jobs.api.records import JobsClient, JobsService
from serve_app.jobs.api.usage import UsagePage, UsageQuery, UsageRow
from serve_app.keys.authenticator import Principal
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.job_schema import UsageListQuery
from serve_app.openai.request.parsing import parse_body
from serve_app.reference.job_answers import UsageList
from serve_app.reference.operations import Operation

_DEFAULT_DAYS, _MAX_DAYS = 30, 366
_COLUMNS = (
    "date",
    "tenant",
    "model",
    "band",
    "num_requests",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "computed_tokens",
    "wasted_tokens",
    "device_seconds",
)


@dataclass(frozen=True, slots=True)
class UsageEndpoints:
    """Endpoint that shows usage by day, tenant, model and band; a tenant sees its own, an operator all."""

    client: JobsClient
    clock: Clock

    @Operation(
        "GET",
        "/v1/usage",
        "Usage",
        UsageList,
        {"text/csv": ()},
        failures=frozenset({400, 403, 503}),
        query=UsageListQuery,
        answer_headers=("x-headway-has-more",),
    )
    async def show(self, request: Request) -> Response:
        """Show tokens and computing time by day, tenant, model and band, as JSON or CSV."""
        asked = parse_body(UsageListQuery, request.query_params, {})
        today = datetime.fromtimestamp(self.clock.unix(), UTC).date()
        query = _query_of(asked, exchange_of(request).principal, today)
        page = await self.client.call(JobsService.usage, query)
        if asked.format == "csv":
            headers = {"x-headway-has-more": str(page.has_more).lower()}
            return Response(_csv_of(page), headers=headers, media_type="text/csv")
        data = [{"object": "usage", **_fields_of(row)} for row in page.rows]
        days = {"start_date": query.first_day.isoformat(), "end_date": query.last_day.isoformat()}
        return json_response({"object": "list", "data": data, "has_more": page.has_more, **days})


def _query_of(asked: UsageListQuery, principal: Principal, today: date) -> UsageQuery:
    last_day = asked.end_date or today
    first_day = asked.start_date or _days_before(last_day, _DEFAULT_DAYS)
    if first_day > last_day:
        raise InvalidRequest(f"`start_date` is {first_day}, after `end_date`, {last_day}", "start_date")
    num_days = (last_day - first_day).days + 1
    if num_days > _MAX_DAYS:
        raise InvalidRequest(
            f"`start_date` to `end_date` are {num_days} days; at most {_MAX_DAYS} are accepted", "start_date"
        )
    tenant = asked.tenant
    if not principal.is_operator:
        if tenant not in (None, principal.tenant):
            raise operator_key_required()
        tenant = principal.tenant
    return UsageQuery(first_day, last_day, tenant, asked.model, asked.limit)


def _days_before(day: date, num_days: int) -> date:
    """Return the day some days earlier, no earlier than the first of the calendar."""
    return day - timedelta(days=min(num_days, (day - date.min).days))


def _fields_of(row: UsageRow) -> JsonObject:
    sums = row.sums
    values = (
        row.key.day,
        row.key.tenant,
        row.key.model,
        row.key.band.name.lower(),
        sums.num_requests,
        sums.prompt_tokens,
        sums.cached_tokens,
        sums.output_tokens,
        sums.computed_tokens,
        sums.wasted_tokens,
        round(sums.device_s, 6),
    )
    return dict(zip(_COLUMNS, values, strict=True))


def _csv_of(page: UsagePage) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_fields_of(row) for row in page.rows)
    return text.getvalue()
