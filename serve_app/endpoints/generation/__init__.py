"""Completions while the client waits, single ones by their id, and the model that answers them.

Read `completions.py` first. May import `replicas.errors`, `serve_app.endpoints`, `serve_app.errors`, `serve_app.http`,
`serve_app.jobs`, `serve_app.keys`, `serve_app.openai`, `serve_app.protocols`, `serve_app.reference`.
"""
