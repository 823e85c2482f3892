"""Commands of the terminal.

Read `main.py` first. May import `replicas.cpu_scheduling`, `serve_app.config`.
"""
