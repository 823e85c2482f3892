"""All SQL: rows, and the transactions over them.

Read `schema/tables.py` first, then `batch_states.py`. May import `replicas.errors`, `serve_app.jobs.api`,
`serve_app.jobs.webhooks`, `serve_app.tracing`.
"""
