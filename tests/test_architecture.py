"""DESIGN.md's import table: a module imports only from lower rows, and the pure ones run without Ray or torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("serve_app", "router", "replicas")

# A module's row, and its place within the row, are those of the longest prefix that names it. It may import
# whatever stands lower, and the other modules of its own prefix.
ROWS = {
    "serve_app.cli": (8, 0),
    "serve_app.cluster_gpus": (6, 0),
    "serve_app.app": (7, 0),
    "serve_app.jobs_deployment": (6, 3),
    "serve_app.routing": (6, 1),
    "serve_app.jobs.serve_client": (6, 1),
    "serve_app.ingress": (6, 1),
    "serve_app.endpoints": (6, 0),
    "serve_app.jobs": (5, 3),
    "serve_app.jobs.settings": (4, 0),
    "serve_app.jobs.webhook_addresses": (4, 0),
    "serve_app.process_setup": (4, 0),
    "serve_app.wakeup": (4, 0),
    "router.serve_router": (6, 0),
    "serve_app.openai": (5, 2),
    "serve_app.auth": (5, 1),
    "serve_app.errors": (5, 0),
    "serve_app.router_metrics": (5, 1),
    "serve_app.metrics": (5, 0),
    "serve_app.config": (5, 0),
    "serve_app.config_page": (5, 1),
    "serve_app.endpoints.settings": (4, 1),
    "serve_app.openai.settings": (4, 0),
    "router.autoscaling_loop": (4, 0),
    "router.dispatch": (4, 0),
    "replicas.model_replica": (4, 0),
    "replicas.options": (3, 1),
    "router.scaling_inputs": (3, 2),
    "router.admission": (3, 1),
    "router.autoscaling": (3, 1),
    "router.flow_control": (3, 2),
    "router.policy": (3, 1),
    "router.flow_queue": (3, 0),
    "router.held_work": (3, 0),
    "router.latency_targets": (3, 0),
    "router.load_table": (3, 0),
    "router.output_lengths": (3, 0),
    "router.prefix_index": (3, 0),
    "router.served_account": (3, 1),
    "router.slots": (3, 0),
    "replicas.engine.async_engine": (3, 0),
    "replicas.model": (3, 0),
    "router.types": (2, 0),
    "replicas.engine.engine": (2, 0),
    "replicas.engine.intake": (1, 4),
    "replicas.engine.load_report": (1, 4),
    "replicas.engine.pipeline": (1, 4),
    "replicas.engine.generation": (1, 4),
    "replicas.engine.scheduler": (1, 3),
    "replicas.engine.detokenizer": (1, 3),
    "replicas.engine.block_manager": (1, 2),
    "replicas.engine.deadlines": (1, 2),
    "replicas.engine.stats": (1, 2),
    "replicas.engine.latency_controller": (1, 2),
    "replicas.engine.step_plan": (1, 2),
    "replicas.engine.waiting_queue": (1, 2),
    "replicas.engine.interfaces": (1, 2),
    "replicas.engine.batch": (1, 1),
    "replicas.engine.sequence": (1, 0),
    "replicas.engine.config": (1, 0),
    "replicas.protocol": (0, 1),
    "replicas.clock": (0, 0),
    "replicas.errors": (0, 0),
    "replicas.rates": (0, 0),
    "replicas.block_hash": (0, 0),
    "replicas.cpu_sharing": (0, 0),
    "replicas.settings": (0, 0),
    "replicas.tokenizer_files": (0, 0),
}
# Scripts that nothing imports.
APART = ("replicas.demo",)

# Prefixes of the project's modules that a part may see; a part that is not listed is bound by the rows alone.
VISIBLE = {
    "router": (
        "router",
        "replicas.protocol",
        "replicas.errors",
        "replicas.block_hash",
        "replicas.rates",
        "replicas.settings",
    ),
    "replicas": ("replicas",),
    "replicas.engine": (
        "replicas.engine",
        "replicas.clock",
        "replicas.protocol",
        "replicas.errors",
        "replicas.block_hash",
        "replicas.cpu_sharing",
        "replicas.rates",
        "replicas.settings",
    ),
    "replicas.model": (
        "replicas.model",
        "replicas.engine.batch",
        "replicas.engine.config",
        "replicas.engine.interfaces",
        "replicas.engine.sequence",
        "replicas.protocol",
        "replicas.errors",
        "replicas.rates",
        "replicas.settings",
        "replicas.tokenizer_files",
    ),
}

# Third-party packages, and the only modules that may import them.
CONFINED = {
    "ray": (
        "serve_app.app",
        "serve_app.cli",
        "serve_app.cluster_gpus",
        "serve_app.jobs.serve_client",
        "serve_app.jobs_deployment",
        "serve_app.routing",
        "router.serve_router",
    ),
    "sqlalchemy": ("serve_app.jobs",),
    "alembic": ("serve_app.jobs",),
    "torch": ("replicas.model", "replicas.model_replica", "replicas.demo", "serve_app.cluster_gpus"),
    "transformers": (
        "replicas.model",
        "replicas.model_replica",
        "replicas.demo",
        "replicas.tokenizer_files",
        "serve_app",
    ),
    "triton": (
        "replicas.model.triton_kernels",
        "replicas.model.triton_layer_kernels",
        "replicas.model.triton_layer_math",
        "replicas.model.triton_shapes",
        "replicas.model.triton_write",
    ),
    "fastapi": ("serve_app",),
    "starlette": ("serve_app",),
    "pydantic": ("serve_app",),
}
STDLIB_ONLY = (
    "replicas.engine",
    "replicas.clock",
    "replicas.protocol",
    "replicas.errors",
    "replicas.rates",
    "replicas.block_hash",
    "replicas.cpu_sharing",
    "replicas.model.options",
    "replicas.options",
    "replicas.settings",
    "router.types",
    "router.autoscaling",
    "router.autoscaling_loop",
    "router.flow_control",
    "router.flow_queue",
    "router.held_work",
    "router.latency_targets",
    "router.load_table",
    "router.output_lengths",
    "router.policy",
    "router.prefix_index",
    "router.served_account",
    "router.slots",
    "router.scaling_inputs",
    "router.dispatch",
)


def is_in(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def module_files() -> dict[str, Path]:
    files: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = module_files()


def is_package_root(module: str) -> bool:
    """Whether a module is the (empty) `__init__` of a package that has no row of its own."""
    return module in FILES and FILES[module].name == "__init__.py" and module not in ROWS


def read_imports(module: str) -> Iterator[str]:
    """Absolute names of what a module imports; `from package import module` counts as the module."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import; write absolute ones"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module


def own_imports(module: str) -> list[str]:
    return [name for name in IMPORTS[module] if name.split(".")[0] in PACKAGES]


def part(module: str) -> str:
    """The prefix in ROWS that a module belongs to."""
    prefix = max((prefix for prefix in ROWS if is_in(module, (prefix,))), key=len, default=None)
    assert prefix is not None, f"{module} is in no row; give it one in ROWS"
    return prefix


# All read now: CPython 3.11's `ast` fails now and then in a process where other threads run.
IMPORTS = {module: tuple(read_imports(module)) for module in FILES}
CHECKED = [module for module in FILES if not is_in(module, APART) and not is_package_root(module)]


@pytest.mark.parametrize("module", CHECKED)
def test_a_module_imports_only_from_lower_rows(module: str) -> None:
    mine = part(module)
    for imported in own_imports(module):
        if not is_package_root(imported) and part(imported) != mine:
            assert ROWS[part(imported)] < ROWS[mine], f"{module} {ROWS[mine]} imports {imported} {ROWS[part(imported)]}"


@pytest.mark.parametrize("module", CHECKED)
def test_a_part_sees_only_what_the_table_lists(module: str) -> None:
    for prefix, visible in VISIBLE.items():
        if is_in(module, (prefix,)) and module != "replicas.model_replica":
            hidden = [name for name in own_imports(module) if name != prefix and not is_in(name, visible)]
            assert not hidden, f"{module} must not import {hidden}"


@pytest.mark.parametrize("module", CHECKED)
def test_libraries_stay_where_they_belong(module: str) -> None:
    for library, allowed in CONFINED.items():
        if not is_in(module, allowed):
            assert not any(is_in(name, (library,)) for name in IMPORTS[module]), f"{module} must not import {library}"


@pytest.mark.parametrize("module", [module for module in CHECKED if is_in(module, STDLIB_ONLY)])
def test_pure_modules_import_only_the_standard_library(module: str) -> None:
    foreign = [
        name
        for name in IMPORTS[module]
        if name.split(".")[0] not in sys.stdlib_module_names and name.split(".")[0] not in PACKAGES
    ]
    assert not foreign, f"{module} must not import {foreign}"


def test_no_import_cycles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join([*path, module])}"
        if module not in done:
            for imported in own_imports(module):
                if imported != module and imported in FILES:
                    visit(imported, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


def test_pure_modules_import_without_ray_or_torch() -> None:
    pure = [module for module in CHECKED if is_in(module, STDLIB_ONLY)]
    import_without(("ray", "torch", "transformers", "fastapi", "pydantic", "numpy"), pure)


def test_a_replica_or_ingress_imports_no_library_of_the_jobs_process() -> None:
    """Each process of the application reads `serve_app.app`; libraries come in with what a process constructs."""
    heavy = ("sqlalchemy", "alembic", "aiohttp", "transformers", "torch")
    import_without((), ["serve_app.app"], f"assert not [name for name in {heavy!r} if name in sys.modules]")


def test_processes_without_a_model_import_no_torch() -> None:
    """It takes seconds to import, and hundreds of megabytes."""
    modules = ["serve_app.app", "serve_app.cli.main", "serve_app.ingress", "serve_app.jobs.runtime"]
    load = f"from replicas.tokenizer_files import load_tokenizer; load_tokenizer({str(ROOT / 'replicas' / 'demo')!r})"
    import_without((), modules, f"{load}; assert 'torch' not in sys.modules")


def import_without(blocked: tuple[str, ...], modules: list[str], afterwards: str = "") -> None:
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"{afterwards}\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
