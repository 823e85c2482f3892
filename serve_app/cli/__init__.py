"""Command line: `headway`, its subcommands, and the private Ray cluster that `make serve` starts.

Read `main.py` first. May import `replicas.cpu_scheduling`, `replicas.errors`, `replicas.model.loading`,
`replicas.protocol`, `serve_app.app`, `serve_app.benchmark`, `serve_app.compound_settings`, `serve_app.config`,
`serve_app.config_page`,
`serve_app.errors`, `serve_app.grafana`, `serve_app.http`, `serve_app.key_file`, `serve_app.models`,
`serve_app.replaced_settings`.
"""
