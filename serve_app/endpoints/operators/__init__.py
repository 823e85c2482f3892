"""Endpoints for operators and orchestrators: probes, metrics, load, the dashboard and the usage.

Read `operations.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.timing`, `router.dispatch`,
`router.flow`, `router.scaling`, `router.types`, `serve_app.endpoints`, `serve_app.errors`, `serve_app.http`,
`serve_app.jobs`, `serve_app.keys`, `serve_app.monitoring`, `serve_app.openai`, `serve_app.reference`.
"""
