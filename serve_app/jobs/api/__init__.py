"""Records, settings and errors of jobs that cross processes.

Read `records.py` first, then `new_lines.py`. May import `replicas.errors`, `replicas.protocol`, `replicas.settings`,
`serve_app.tracing`.
"""
