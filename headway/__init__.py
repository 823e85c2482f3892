"""Import path of the application for Ray Serve: `headway:build`, for `serve run` and `import_path:` in its files."""

from __future__ import annotations

from serve_app.app import build

__all__ = ["build"]
