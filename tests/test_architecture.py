"""The folders are the architecture: the `__init__` of each lists its allowed imports, and imports form no cycle.

A folder's docstring ends with "May import" and names in backticks; a name covers the folders within it, and a folder
may import those within itself. Modules directly in a top package stand for themselves. The product knows no test kit,
the test kit no benchmarks, the benchmarks no tests.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from testkit.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("replicas", "router", "serve_app", "headway")
# A package sees itself and those before it.
TOPS = (*PRODUCT, "testkit", "bench", "tests")
# Parts that see less than their packages and folders do.
MAY_SEE = {
    "replicas": ("replicas",),
    "replicas.model": (
        "replicas.model",
        "replicas.engine.batch",
        "replicas.engine.config",
        "replicas.engine.sequence",
        "replicas.protocol",
        "replicas.errors",
        "replicas.settings",
        "replicas.text.tokenizer_files",
        "replicas.child_processes",
    ),
    "router": (
        "router",
        "replicas.transport.wire",
        "replicas.protocol",
        "replicas.errors",
        "replicas.shared_rules",
        "replicas.timing",
        "replicas.settings",
    ),
    "headway": ("headway", "serve_app.app"),
}
MAX_ROOT_FILES = 8
MAX_PARAMETERS = 5
FEW_LINES = 40
MAX_SMALL_FILES = 12
WIDE_CONSTRUCTORS = {"CompletionService", "AsyncEngine"}

# Third-party packages, and the only folders that may import them.
CONFINED = {
    "ray": (
        "router.serve_router",
        "serve_app.app",
        "serve_app.cli",
        "serve_app.deployments",
        "serve_app.jobs.client",
        "serve_app.monitoring.ray_metrics",
    ),
    "sqlalchemy": (
        "serve_app.jobs.storage",
        "serve_app.jobs.lifecycle",
        "serve_app.jobs.execution",
        "serve_app.jobs.service",
        "serve_app.jobs.responses",
    ),
    "alembic": ("serve_app.jobs.storage",),
    "torch": ("replicas.model", "serve_app.deployments.autoscaling"),
    "transformers": (
        "replicas.model",
        "replicas.text.tokenizer_files",
        "replicas.text.grammar",
        "serve_app.openai.tokenize",
    ),
    "llguidance": ("replicas.text.grammar",),
    "cryptography": ("serve_app.protocols.responses.encrypted_content",),
    "lark": ("serve_app.protocols.responses.custom_input",),
    "opentelemetry": ("serve_app.tracing",),
    "triton": ("replicas.model.attention", "replicas.model.layers", "replicas.model.sampling"),
    "fastapi": ("serve_app.deployments.ingress", "serve_app.http_app"),
    "starlette": ("serve_app",),
    "pydantic": ("serve_app",),
    "msgspec": ("replicas.transport.wire",),
}
STDLIB_ONLY = (
    "replicas.protocol",
    "replicas.errors",
    "replicas.shared_rules",
    "replicas.timing",
    "replicas.settings",
    "replicas.options",
    "replicas.model.loading.options",
    "router",
)
NOT_STDLIB_ONLY = ("router.serve_router", "replicas.transport.wire")
# The numbers of running sequences are in arrays.
STDLIB_AND_NUMPY = ("replicas.engine", "replicas.transport")


def is_in(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def module_files() -> dict[str, Path]:
    files: dict[str, Path] = {}
    for package in TOPS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = module_files()
# All read now: CPython 3.11's `ast` fails now and then in a process where other threads run.
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}


def read_imports(module: str) -> Iterator[str]:
    """Absolute names of what a module imports; `from package import module` counts as the module."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import; write absolute ones"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module


IMPORTS = {module: tuple(read_imports(module)) for module in FILES}
IN_PRODUCT = [module for module in FILES if is_in(module, PRODUCT)]


def own_imports(module: str) -> list[str]:
    return [name for name in IMPORTS[module] if name.split(".")[0] in TOPS]


def is_package(module: str) -> bool:
    return module in FILES and FILES[module].name == "__init__.py"


def folder(module: str) -> str:
    """Return the part of the architecture of a module: its folder, or in a top package the module itself."""
    parent = module.rpartition(".")[0]
    return module if is_package(module) or not parent or parent in TOPS else parent


FOLDERS = sorted({folder(module) for module in IN_PRODUCT} - set(PRODUCT))
DOCUMENTED = [name for name in FOLDERS if is_package(name)]


def used_folders(name: str) -> set[str]:
    modules = [module for module in FILES if folder(module) == name]
    return {folder(imported) for module in modules for imported in own_imports(module)} - {name}


def allowed_folders(name: str) -> set[str]:
    text = ast.get_docstring(TREES[name]) or ""
    _, found, allowed = text.partition("May import ")
    assert found, f"{name}/__init__.py does not say what the folder may import"
    return set(re.findall(r"`([a-z_.]+)`", allowed))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_folder_imports_what_its_docstring_says(name: str) -> None:
    used, allowed = used_folders(name), allowed_folders(name)
    upward = {other for other in used if not is_in(other, (name, *allowed))}
    assert not upward, f"{name} must not import {sorted(upward)}"
    unused = {other for other in allowed if not any(is_in(one, (other,)) for one in used)}
    assert not unused, f"{name} may import {sorted(unused)} and does not: shorten its docstring"


def test_no_import_goes_round_between_folders() -> None:
    try:
        TopologicalSorter({name: used_folders(name) for name in {folder(module) for module in FILES}}).prepare()
    except CycleError as error:
        pytest.fail(f"folders import each other: {' <- '.join(error.args[1])}")


def test_no_import_goes_round_between_modules() -> None:
    try:
        TopologicalSorter({module: own_imports(module) for module in FILES}).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


def test_packages_see_only_those_below() -> None:
    hidden = []
    for module in FILES:
        tops = {module.split(".")[0]: TOPS[: TOPS.index(module.split(".")[0]) + 1]}
        for prefix, visible in {**tops, **MAY_SEE}.items():
            if is_in(module, (prefix,)):
                hidden += [(module, name) for name in own_imports(module) if not is_in(name, visible)]
    assert not hidden, f"upward imports: {hidden}"


def rooms(name: str, imports: dict[str, tuple[str, ...]]) -> dict[str, set[str]]:
    """Return the imports between the parts of a folder: those within it, each with all that it holds, and its files."""

    def room(module: str) -> str | None:
        is_inside = module in FILES and module.startswith(f"{name}.")
        return f"{name}.{module.removeprefix(f'{name}.').partition('.')[0]}" if is_inside else None

    found: dict[str, set[str]] = {}
    for module, used in imports.items():
        if (importer := room(module)) is not None:
            found.setdefault(importer, set()).update(one for one in map(room, used) if one not in (None, importer))
    return found


def check_rooms(name: str, imports: dict[str, tuple[str, ...]]) -> None:
    try:
        TopologicalSorter(rooms(name, imports)).prepare()
    except CycleError as error:
        pytest.fail(f"an import runs up between parts of {name}: {' <- '.join(error.args[1])}")


LARGE = [name for name in FILES if is_package(name) and any(other.startswith(f"{name}.") for other in FILES)]


@pytest.mark.parametrize("name", LARGE)
def test_no_import_runs_up_between_the_parts_of_a_folder(name: str) -> None:
    check_rooms(name, IMPORTS)


def test_an_import_that_runs_up_is_found() -> None:
    """Metrics of HTTP had the counts of jobs as a type of `jobs`, whose execution has the metrics of completions."""
    page = "serve_app.monitoring.page"
    upward = {**IMPORTS, page: (*IMPORTS[page], "serve_app.jobs.api.records")}
    with pytest.raises(pytest.fail.Exception, match="an import runs up between parts of serve_app"):
        check_rooms("serve_app", upward)


def folder_lines() -> str:
    """One line for each package and each folder of the product's packages: the first line of its docstring."""
    names = [name for name in FILES if is_package(name) and name.count(".") <= name.startswith(PRODUCT)]
    lines = {name: (ast.get_docstring(TREES[name]) or "").partition("\n")[0] for name in names}
    listed = (f"- `{name.replace('.', '/')}`: {line}\n" for name, line in lines.items() if name != "tests")
    return f"\n{''.join(listed)}\n"


def test_the_documented_folders_are_those_of_the_tree() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.search(r"<!-- folders: .* -->\n(.*)<!-- end of folders -->", text, re.DOTALL)
    assert listed and listed[1] == folder_lines(), "python -m tests.test_architecture writes them"


def parents_of_folders() -> list[Path]:
    """Return the folders that have folders."""
    folders = [path for top in TOPS for path in (ROOT / top, *(ROOT / top).rglob("*")) if path.is_dir()]
    return sorted({path.parent for path in folders if path.name != "__pycache__"} - {ROOT})


@pytest.mark.parametrize("path", parents_of_folders(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_root_of_a_folder_with_folders_stays_small(path: Path) -> None:
    files = [file.name for file in path.iterdir() if file.is_file() and file.name != "__init__.py"]
    assert len(files) <= MAX_ROOT_FILES, f"{path} has {sorted(files)}; which folder of it do they belong to?"


def num_statements(*packages: str) -> int:
    sources = (source for package in packages for source in (ROOT / package).rglob("*.py"))
    return sum(isinstance(node, ast.stmt) for source in sources for node in ast.walk(ast.parse(source.read_text())))


def test_measurements_are_at_most_a_third_of_the_product() -> None:
    product, bench = num_statements(*PRODUCT), num_statements("bench")
    assert bench <= product / 3, f"bench has {bench} statements, the product {product}: retire a measurement"


def test_constructors_have_few_parameters() -> None:
    wide = {
        node.name
        for name in IN_PRODUCT
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if len(method.args.args) + len(method.args.kwonlyargs) - 1 > MAX_PARAMETERS
    }
    assert wide <= WIDE_CONSTRUCTORS


def test_few_files_of_the_product_are_small() -> None:
    sources = [source for package in PRODUCT for source in sorted((ROOT / package).rglob("*.py"))]
    whole = [source for source in sources if source.name != "__init__.py" and "migrations" not in source.parts]
    small = [str(source.relative_to(ROOT)) for source in whole if len(source.read_text().splitlines()) < FEW_LINES]
    assert len(small) <= MAX_SMALL_FILES, f"{small}: which files do they belong to?"


@pytest.mark.parametrize("library", list(CONFINED))
def test_libraries_stay_where_they_belong(library: str) -> None:
    elsewhere = [module for module in IN_PRODUCT if not is_in(module, CONFINED[library])]
    wrong = [module for module in elsewhere if any(is_in(name, (library,)) for name in IMPORTS[module])]
    assert not wrong, f"{wrong} must not import {library}"


WITHOUT = ("ray", "torch", "transformers", "fastapi", "pydantic")
PURE = [module for module in IN_PRODUCT if is_in(module, STDLIB_ONLY) and not is_in(module, NOT_STDLIB_ONLY)]


def test_pure_modules_import_only_the_standard_library() -> None:
    known = (*sys.stdlib_module_names, *PRODUCT)
    foreign = [(module, name) for module in PURE for name in IMPORTS[module] if name.split(".")[0] not in known]
    assert not foreign, f"neither of the standard library nor of this project: {foreign}"


def test_the_engine_imports_the_standard_library_and_numpy() -> None:
    known = (*sys.stdlib_module_names, *PRODUCT, "numpy")
    engine = [m for m in IN_PRODUCT if is_in(m, STDLIB_AND_NUMPY) and not is_in(m, NOT_STDLIB_ONLY)]
    foreign = [(module, name) for module in engine for name in IMPORTS[module] if name.split(".")[0] not in known]
    assert not foreign, f"neither of the standard library nor numpy nor of this project: {foreign}"
    import_without((*WITHOUT, "numpy"), ["replicas.engine.config"])
    import_without(WITHOUT, engine)


def test_pure_modules_import_without_ray_or_torch() -> None:
    import_without((*WITHOUT, "numpy"), PURE)


def test_processes_without_a_model_import_no_torch() -> None:
    """It takes seconds to import, and hundreds of megabytes."""
    commands = [module for module in FILES if is_in(module, ("serve_app.cli",))]
    modules = ["serve_app.app", *commands, "serve_app.http_app", "serve_app.jobs.runtime"]
    demo = str(ROOT / "replicas" / "demo")
    load = f"from replicas.text.tokenizer_files import load_tokenizer; load_tokenizer({demo!r})"
    import_without((), modules, f"{load}; assert 'torch' not in sys.modules")


HEAVY = ("sqlalchemy", "alembic", "aiohttp", "transformers", "torch")
DEPLOYMENTS = ("serve_app.deployments.model", "serve_app.deployments.ingress", "serve_app.deployments.jobs")


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_a_process_imports_its_own_deployment_alone(deployment: str) -> None:
    """Serve imports the module of a deployment's class in each of its processes. Libraries come with construction."""
    unwanted = [*HEAVY, "serve_app.app", *(other for other in DEPLOYMENTS if other != deployment)]
    import_without((), [deployment], f"found = set({unwanted!r}) & set(sys.modules); assert not found, found")


def test_building_the_application_imports_no_heavy_library() -> None:
    import_without((), ["headway"], f"found = set({HEAVY!r}) & set(sys.modules); assert not found, found")


def test_the_command_starts_without_ray_or_torch() -> None:
    """`headway chat` must answer a key press at once."""
    heavy = {"ray", "torch", "transformers", "fastapi", "sqlalchemy", "pydantic"}
    import_without(
        (),
        ["serve_app.cli.main", "serve_app.cli.clients.chat"],
        f"found = {heavy!r} & set(sys.modules); assert not found, found",
    )


def import_without(blocked: tuple[str, ...], modules: list[str], afterwards: str = "") -> None:
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"{afterwards}\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr


def write_folders() -> None:
    """Write the folders' lines into the documentation."""
    path = ROOT / "docs" / "architecture.md"
    begin, _, rest = path.read_text().partition("python -m tests.test_architecture -->\n")
    end = rest.partition("<!-- end of folders -->")[2]
    marker = "python -m tests.test_architecture -->\n"
    path.write_text(f"{begin}{marker}{folder_lines()}<!-- end of folders -->{end}")


if __name__ == "__main__":
    write_folders()
