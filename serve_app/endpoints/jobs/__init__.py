"""Asynchronous work: jobs, batches of files and of prompts, and the files themselves.

Read `job_requests.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.timing`, `serve_app.errors`,
`serve_app.http`, `serve_app.jobs`, `serve_app.openai`, `serve_app.protocols`, `serve_app.reference`,
`serve_app.tracing`.
"""
