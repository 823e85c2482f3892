"""Checks before a start or an update: of a configuration's fields, and of its files and its memory on one machine.

Read `machine.py` first. `headway serve`, `headway check` and `build` share them. May import `replicas.errors`,
`replicas.model.hardware`, `replicas.model.loading`, `replicas.text`, `serve_app.config`, `serve_app.keys`,
`serve_app.models`, `serve_app.openai`.
"""
