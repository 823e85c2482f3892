"""Routes of the HTTP API: each handler turns a request into calls to the services and their results into a response.

Read `generation/completions.py` first. May import `replicas.errors`, `serve_app.errors`, `serve_app.http`,
`serve_app.openai`, `serve_app.reference`.
"""
