"""Pages of stored items: their queries, and their lists in answers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from serve_app.http.exchange import json_response
from serve_app.jobs.api.responses import ItemPage, ItemPageRequest
from serve_app.openai.request.job_schema import ItemListQuery
from serve_app.openai.request.parsing import parse_body
from serve_app.protocols.responses.stored import parsed_items


def item_page_of(request: Request) -> ItemPageRequest:
    """Return the part of a list of items that a request asks for.

    Raises:
        InvalidRequest: a field of the query is wrong.
    """
    query = parse_body(ItemListQuery, request.query_params, {})
    return ItemPageRequest(query.limit, query.after, query.order == "asc")


def item_list(page: ItemPage) -> Response:
    """Return the answer with a page of items."""
    items = parsed_items(page.items)
    return json_response(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": page.has_more,
        }
    )
