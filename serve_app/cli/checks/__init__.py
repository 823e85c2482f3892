"""Checks of `headway doctor`: of this machine, and of a model on it.

Read `machine_checks.py` first. May import `replicas.errors`, `replicas.model.hardware`, `replicas.model.loading`,
`serve_app.cli.clients`, `serve_app.config`, `serve_app.models`.
"""
