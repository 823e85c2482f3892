"""Command line: `headway`, its subcommands, and the private Ray cluster that `make serve` starts.

Read `main.py` first. May import `replicas.errors`, `replicas.model.loading`, `replicas.protocol`, `replicas.timing`,
`serve_app.app`, `serve_app.benchmark`, `serve_app.compound_settings`, `serve_app.config`, `serve_app.config_page`,
`serve_app.errors`, `serve_app.http`, `serve_app.keys`, `serve_app.models`, `serve_app.monitoring`,
`serve_app.one_root`, `serve_app.replaced_settings`.
"""
