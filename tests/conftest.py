"""Assignment of test modules to the processes of a run."""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

pytest_plugins = ["tests.durations", "tests.seeds"]

_RAY = "tests/ray/"
_INTERPRETED = "tests/model/interpreted/"
_MODEL = "tests/model/"


class ModuleSharing(LoadScopeScheduling):
    """Scheduler that gives each process one module at a time, of the modules that the process may run.

    1. Modules that start Ray run in the process named `ray`, one after the other: on two cores, two clusters that start
       together exceed Ray's time limits.
    2. Modules of kernels in Triton's interpreter run in the process named `interpreter`, which runs no other tests of
       models: the interpreter takes the place of the compiler for a whole process.
    3. A process begins with the modules that only it may run. All other modules go to any process, in order.

    Where no process has one of these names, as with `--numprocesses`, the first one takes its place.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        allowed = [module for module in self.workqueue if self._may_run(node, module)]
        if not allowed:
            node.shutdown()
            return
        chosen = next(filter(_owner_name, allowed), allowed[0])
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if any(self._may_run(node, module) for module in self.workqueue):
            super()._reschedule(node)
        elif not node.shutting_down:
            node.shutdown()

    def _may_run(self, node: WorkerController, module: str) -> bool:
        owner = _owner_name(module)
        if owner is None:
            return not (node.gateway.id == "interpreter" and module.startswith(_MODEL))
        names = [other.gateway.id for other in self.nodes]
        return bool(node.gateway.id == (owner if owner in names else min(names)))


def _owner_name(module: str) -> str | None:
    """Return the name of the only process that may run a module; None: any."""
    if module.startswith(_RAY):
        return "ray"
    return "interpreter" if module.startswith(_INTERPRETED) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ModuleSharing | None:
    """Return the scheduler of tests for xdist; None: its own."""
    return ModuleSharing(config, log) if config.getoption("dist") == "loadscope" else None
