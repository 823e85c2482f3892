"""Hooks into private parts of Ray Serve: one table in docs/architecture.md, made for one version of Serve."""

import ast
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from ray._private import services
from ray.serve._private import constants, replica
from ray.serve._private.config import DeploymentConfig
from ray.serve.deployment import Deployment

ROOT = Path(__file__).resolve().parents[1]
SERVE_VERSION = "2.60.0"
PRODUCT = ("serve_app", "router", "replicas")
# Written into HAProxy's configuration, which Serve has no private name for.
BY_TEXT = {"serve_app/cli/server/haproxy.py"}


def documented() -> list[tuple[str, str]]:
    """Return the file and the private part of each hook in the document."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Hooks into Ray Serve")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\S+\.py)` \| `([^`]+)`", text, re.MULTILINE)


def private_parts(source: Path) -> set[str]:
    """Return the private names of other packages that a file uses: modules, and attributes of what is not its own."""
    tree = ast.parse(source.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {node.module for node in imports if node.module and "._private" in node.module}
    uses_ray = any((node.module or "").partition(".")[0] == "ray" for node in imports)
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if uses_ray and isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and not is_own(node.value)
    }
    return modules | attributes


def is_own(value: ast.expr) -> bool:
    """Return True for `self`, `cls` and attributes of theirs: private names on them are the file's own."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def test_the_hooks_were_made_for_this_version() -> None:
    assert version("ray") == SERVE_VERSION, "try every hook of the table with the other version, then change this test"


def test_the_table_names_every_hook() -> None:
    sources = [source for package in PRODUCT for source in sorted((ROOT / package).rglob("*.py"))]
    hooked = {str(source.relative_to(ROOT)) for source in sources if private_parts(source)}
    assert hooked | BY_TEXT == {file for file, _ in documented()}


@pytest.mark.parametrize(
    "owner", [constants, replica, services, Deployment("", DeploymentConfig(), None, _internal=True)]
)
def test_the_private_parts_are_there(owner: object) -> None:
    names = {name.rpartition(".")[2] for _, name in documented()}
    assert any(hasattr(owner, name) for name in names)
