"""A server in the foreground: its private Ray cluster, its application, its data directory, its log and its report.

Read `server.py` first. May import `replicas.child_processes`, `replicas.model.hardware`, `replicas.protocol`,
`replicas.timing`, `serve_app.app`, `serve_app.config`, `serve_app.errors`, `serve_app.http`, `serve_app.keys`,
`serve_app.models`, `serve_app.preflight`.
"""
