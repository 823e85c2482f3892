"""Execution of lines: lease, run, write the results.

Read `worker.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.timing`, `router.flow`,
`router.scaling`, `router.timeline`, `router.types`, `serve_app.errors`, `serve_app.jobs.api`, `serve_app.jobs.storage`,
`serve_app.keys`, `serve_app.monitoring`, `serve_app.openai`, `serve_app.protocols`, `serve_app.tracing`,
`serve_app.wakeup`.
"""
