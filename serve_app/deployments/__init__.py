"""Deployments of Ray Serve, one module each, with autoscaling and start-up around them.

Read `model.py` first. May import `replicas.clock`, `replicas.errors`, `replicas.model_replica`, `replicas.protocol`,
`router`, `serve_app.config`, `serve_app.ingress`, `serve_app.jobs`, `serve_app.metrics`, `serve_app.openai`,
`serve_app.router_metrics`.
"""
