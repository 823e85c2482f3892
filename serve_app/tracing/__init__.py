"""Traces: W3C trace context, and spans of requests over OTLP, made from a request's timeline when it ends.

Read `tracer.py` first. May import `replicas.settings`, `router.timeline`, `serve_app.openai.reply`,
`serve_app.openai.request`.
"""
