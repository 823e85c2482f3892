"""Command line: `headway`, and its commands.

Read `main.py` first. May import `replicas.child_processes`, `replicas.errors`, `replicas.model.hardware`,
`replicas.model.loading`, `replicas.protocol`, `serve_app.config`, `serve_app.deployments`, `serve_app.keys`,
`serve_app.models`, `serve_app.monitoring`, `serve_app.one_root`, `serve_app.preflight`.
"""
