"""How several processes share the tests."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.durations"]

_START_RAY = ("tests/cluster/", "tests/serve/")


class RayInOneProcess(LoadScopeScheduling):
    """Whatever starts Ray is one piece of work; of everything else, each module is one.

    Two clusters that start together on two cores keep each other from it, and what such tests share is started once.
    """

    def _split_scope(self, nodeid: str) -> str:
        module: str = nodeid.partition("::")[0]
        return "ray" if module.startswith(_START_RAY) else module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RayInOneProcess:
    """What xdist asks for its way to share tests (`--dist loadscope`)."""
    return RayInOneProcess(config, log)
