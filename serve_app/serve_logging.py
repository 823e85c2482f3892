"""Our log lines among Serve's."""

from __future__ import annotations

import logging


def log_through_serve() -> None:
    """Give our loggers Serve's handlers, so that their lines are JSON and carry the request id."""
    serve_logger = logging.getLogger("ray.serve")
    for package in ("serve_app", "router", "replicas"):
        logger = logging.getLogger(package)
        logger.handlers = serve_logger.handlers
        logger.setLevel(serve_logger.level)
        logger.propagate = False
