"""Check at the start that the application's packages come from one directory."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("serve_app", "router", "replicas")


class ForeignPackage(ImportError):
    """Error for a package of another program that has the name of one of the application's and hides it."""


def check_one_root(first: Path | None = None) -> None:
    """Check that `serve_app`, `router` and `replicas` lie in one directory.

    Serve and Ray put the working directory first on the path of the processes that they start, so a user's own
    `router` there hides the application's. `first`: a directory that those processes search first; None: they search as
    this one does.

    Raises:
        ForeignPackage: two of them lie in different directories; the message names both files.
    """
    files = {name: file for name in _PACKAGES if (file := _file_of(name, first)) is not None}
    own = files.get(_PACKAGES[0])
    for name, file in files.items():
        if own is not None and file.parent.parent != own.parent.parent:
            raise ForeignPackage(
                f"`{name}` is {file}, but `{_PACKAGES[0]}` is {own}: the application's packages must lie in one "
                "directory. Rename the one that is not the application's, or start in another directory"
            )


def _file_of(name: str, first: Path | None) -> Path | None:
    """Return the file that `import name` runs; None: there is none."""
    # A folder without `__init__.py` has no origin, and gives way to a package anywhere on the path.
    spec = None if first is None else PathFinder.find_spec(name, [str(first)])
    if spec is None or spec.origin is None:
        spec = find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()
