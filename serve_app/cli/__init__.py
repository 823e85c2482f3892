"""Command line: `headway`, its subcommands, and the private Ray cluster that `make serve` starts.

Read `main.py` first. May import `replicas.cpu_scheduling`, `serve_app.config`.
"""
