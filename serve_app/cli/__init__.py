"""Command line: `headway`, its commands and the options of `headway serve`.

Read `main.py` first. May import `replicas.child_processes`, `replicas.errors`, `replicas.model.hardware`,
`replicas.model.loading`, `replicas.protocol`, `serve_app.config`, `serve_app.config_page`, `serve_app.deployments`,
`serve_app.keys`, `serve_app.models`, `serve_app.monitoring`, `serve_app.one_root`, `serve_app.preflight`,
`serve_app.settings`.
"""
