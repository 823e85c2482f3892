"""All SQL: one module per table, and the transactions over them.

Read `tables.py` first, then `batch_states.py`. May import `replicas.errors`, `replicas.protocol`, `replicas.timing`,
`serve_app.jobs.api`, `serve_app.jobs.files`, `serve_app.jobs.webhooks`, `serve_app.tracing`.
"""
