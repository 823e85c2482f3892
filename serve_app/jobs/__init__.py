"""Asynchronous batches and jobs, stored in SQL. A job is a batch of one line.

Read `api/records.py` first, then `runtime.py`. May import `replicas.errors`, `replicas.protocol`, `replicas.timing`,
`router.serve_router`, `serve_app.openai`.
"""
