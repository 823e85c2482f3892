"""Webhooks: events, signatures, delivery, and a guard against internal addresses.

Read `sender.py` first. May import `replicas.errors`, `replicas.timing`, `serve_app.jobs.api`, `serve_app.jobs.files`,
`serve_app.tracing`, `serve_app.wakeup`.
"""
