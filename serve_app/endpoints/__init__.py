"""Routes of the HTTP API: each handler turns a request into calls to the services and their results into a response.

Read `completions.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.timing`, `router.dispatch`,
`router.flow`, `router.scaling`, `router.types`, `serve_app.errors`, `serve_app.http`, `serve_app.jobs`,
`serve_app.keys`, `serve_app.monitoring`, `serve_app.openai`, `serve_app.reference`, `serve_app.tracing`.
"""
