"""Rows of batches, files, responses, conversations and usage: each module reads and writes its own tables alone.

Read `batches.py` first. May import `replicas.errors`, `replicas.protocol`, `serve_app.jobs.api`,
`serve_app.jobs.storage.schema`, `serve_app.tracing`.
"""
