"""When a request is served and where: ordinary Python, no Ray but in `serve_router`."""
