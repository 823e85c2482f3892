"""Assignment of test modules to the processes of a run."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from serve_app.process import without_collection

pytest_plugins = ["tests.durations", "tests.seeds"]

_ROOT = Path(__file__).resolve().parents[1]
_RAY = "tests/ray/"
_INTERPRETED = "tests/model/interpreted/"
_SHARED = "tests/unit/"
_SESSION = pytest.StashKey[pytest.Session]()


def _may_run(process: str, module: str) -> bool:
    """Return whether a process runs a module; one that has none of the names runs every module."""
    if process == "ray":
        return module.startswith(_RAY)
    if process == "interpreter":
        return module.startswith((_INTERPRETED, _SHARED))
    return process != "others" or not module.startswith((_RAY, _INTERPRETED))


class ModuleSharing(LoadScopeScheduling):
    """Scheduler that gives each process one module at a time, of the modules that the process may run.

    1. Modules that start Ray run in the process named `ray`, one after the other: on two cores, two clusters that start
       together exceed Ray's time limits.
    2. Modules of kernels in Triton's interpreter run in the process named `interpreter`: the interpreter takes the
       place of the compiler for a whole process.
    3. All other modules run in the process named `others`, which shares the unit tests with `interpreter`.
    4. A process begins with the modules that only it may run.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._modules: dict[WorkerController, set[str]] = {}

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Note the tests of a process, which collects those alone that it may run."""
        self.registered_collections[node] = list(collection)
        modules = {self._split_scope(test) for test in collection}
        self._modules[node] = {module for module in modules if _may_run(node.gateway.id, module)}

    def schedule(self) -> None:
        """Give every process two modules if it has none yet, else one if it has none left."""
        if self.collection is None:
            self.collection = [*dict.fromkeys(test for tests in self.registered_collections.values() for test in tests)]
            self.config.stash[_SESSION].testscollected = len(self.collection)
            for test in self.collection:
                self.workqueue.setdefault(self._split_scope(test), {})[test] = False
            for node in self.nodes:
                self._assign_work_unit(node)
        for node in self.nodes:
            self._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        allowed = [module for module in self.workqueue if module in self._modules[node]]
        if not allowed:
            node.shutdown()
            return
        self.workqueue.move_to_end(next(filter(self._has_one_process, allowed), allowed[0]), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if any(module in self._modules[node] for module in self.workqueue):
            super()._reschedule(node)
        elif not node.shutting_down:
            node.shutdown()

    def _has_one_process(self, module: str) -> bool:
        return sum(module in modules for modules in self._modules.values()) == 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let a process collect what it may run, since imports take long; None: others decide.

    Files that are named in the command are collected by all processes, which would miss them.
    """
    process = getattr(config, "workerinput", {}).get("workerid", "")
    if collection_path.suffix == ".py" and all(Path(folder).is_dir() for folder in config.args):
        return None if _may_run(process, collection_path.relative_to(_ROOT).as_posix()) else True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with without_collection():
        return (yield)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_SESSION] = session


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ModuleSharing | None:
    """Return the scheduler of tests for xdist; None: its own."""
    return ModuleSharing(config, log) if config.getoption("dist") == "loadscope" else None
