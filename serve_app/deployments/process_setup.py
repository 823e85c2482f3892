"""What every process of ours does as it starts."""

from __future__ import annotations

import gc
import logging


def log_through_serve() -> None:
    """Give our loggers Serve's handlers, so that their lines are JSON and carry the request id."""
    serve_logger = logging.getLogger("ray.serve")
    for package in ("serve_app", "router", "replicas"):
        logger = logging.getLogger(package)
        logger.handlers = serve_logger.handlers
        logger.setLevel(serve_logger.level)
        logger.propagate = False


def freeze_heap() -> None:
    """Keep the garbage collector from what is there now; called when a process is ready to serve.

    Modules and their like are hundreds of thousands of objects, and all threads stand still for as long as it walks
    over them: a tenth of a second, now and then.
    """
    gc.collect()
    gc.freeze()
