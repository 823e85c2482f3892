"""Which tests one process must run when several share the work."""

from __future__ import annotations

from pathlib import Path

import pytest

_TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share one application are one group; others that start Ray are one for each file."""
    for item in items:
        folder, file = item.path.parent.relative_to(_TESTS).as_posix(), item.path.name
        if folder == "serve":
            group = "serve" if "app" in getattr(item, "fixturenames", ()) else file
            item.add_marker(pytest.mark.xdist_group(group))
        elif folder == "cluster":
            item.add_marker(pytest.mark.xdist_group(folder))
