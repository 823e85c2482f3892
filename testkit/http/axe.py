"""Checks of a page by axe-core, which finds faults of accessibility. npm fetches it once for the user."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

from testkit.http.chromium import Tab

_PACKAGE = "axe-core@4.14.1"
_LIMIT_S = 120.0
_RUN = """axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations.map(fault => ({
    id: fault.id, impact: fault.impact, help: fault.help, nodes: fault.nodes.map(node => node.target.join(" "))})))"""
_SERIOUS = ("serious", "critical")


@functools.cache
def axe_core() -> str | None:
    """Return the script of axe-core; None: it is not here, and npm cannot fetch it."""
    folder = Path("~/.cache/headway-bench").expanduser() / _PACKAGE.replace("@", "-")
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    npm = shutil.which("npm")
    if not script.exists() and npm is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}\n')
        command = [npm, "install", "--no-audit", "--no-fund", "--fetch-retries=1", _PACKAGE]
        subprocess.run(command, cwd=folder, capture_output=True, timeout=_LIMIT_S, check=False)
    return script.read_text() if script.exists() else None


async def serious_faults(tab: Tab) -> list[dict[str, Any]]:
    """Return the serious and critical faults that axe-core finds in the page of a tab."""
    script = axe_core()
    assert script is not None
    await tab.value(f"{script}\ntrue")
    found: list[dict[str, Any]] = await tab.value(_RUN)
    return [fault for fault in found if fault["impact"] in _SERIOUS]
