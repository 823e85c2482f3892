"""Ray Serve deployments, one module each, with their autoscaling policies and process set-up.

Read `model.py` first. May import `replicas.errors`, `replicas.model_replica`, `replicas.protocol`, `replicas.timing`,
`replicas.transport`, `router`, `serve_app.config`, `serve_app.http`, `serve_app.http_app`, `serve_app.jobs`,
`serve_app.keys`, `serve_app.models`, `serve_app.monitoring`, `serve_app.openai`, `serve_app.preflight`,
`serve_app.process`, `serve_app.settings`, `serve_app.tracing`.
"""
