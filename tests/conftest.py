"""Which tests one process must run when several share the work."""

from __future__ import annotations

from pathlib import Path

import pytest

_TESTS = Path(__file__).parent


_START_RAY = ("serve", "cluster")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Ray are one group: two clusters that start together on two cores keep each other from it."""
    for item in items:
        if item.path.parent.relative_to(_TESTS).as_posix() in _START_RAY:
            item.add_marker(pytest.mark.xdist_group("ray"))
