"""Start-up steps that every deployment's process takes: logging and garbage collection."""

from __future__ import annotations

import gc
import logging


def log_through_serve() -> None:
    """Give the application's loggers Serve's handlers, so that their lines are JSON and carry the request id."""
    serve_logger = logging.getLogger("ray.serve")
    for package in ("serve_app", "router", "replicas"):
        logger = logging.getLogger(package)
        logger.handlers = serve_logger.handlers
        logger.setLevel(serve_logger.level)
        logger.propagate = False


def freeze_heap() -> None:
    """Exclude all present objects from garbage collection; call it when the process is ready to serve.

    Imported modules hold hundreds of thousands of objects. A full collection would walk over all of them and stop every
    thread for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
