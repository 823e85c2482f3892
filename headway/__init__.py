"""Import path of the application for Ray Serve: `headway:build`, with `serve run`, `serve deploy` and `import_path:`."""

from __future__ import annotations

from serve_app.app import build

__all__ = ["build"]
