"""Ray Serve deployments, one module each, with their autoscaling policies and process set-up.

Read `model.py` first. May import `replicas.clock`, `replicas.errors`, `replicas.model_replica`,
`replicas.protocol`, `replicas.transport`, `router`, `serve_app.config`, `serve_app.http`, `serve_app.ingress`,
`serve_app.jobs`,
`serve_app.key_exchange`, `serve_app.metrics`, `serve_app.models`, `serve_app.openai`, `serve_app.process`,
`serve_app.process_settings`, `serve_app.rate_limits`, `serve_app.tracing`.
"""
