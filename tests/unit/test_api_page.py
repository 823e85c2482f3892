"""The page about the API names every route, header and error code."""

import re
from pathlib import Path

from serve_app.reference.operations import OPERATIONS
from serve_app.reference.words import ANSWER_HEADERS, FAILURES, REQUEST_HEADERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def test_the_page_names_every_route_header_and_code() -> None:
    text = PAGE.read_text().lower()
    codes = {code for words in FAILURES.values() for code in re.findall("`([a-z_]+)`", words)}
    for name in [*OPERATIONS, *REQUEST_HEADERS, *ANSWER_HEADERS, *codes]:
        assert f"`{name.lower()}`" in text, f"{name} is missing"
