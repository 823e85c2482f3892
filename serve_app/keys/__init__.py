"""API keys: their file, the owners that they authenticate, and the limits of their use.

Read `authenticator.py` first. May import `replicas.errors`, `replicas.protocol`, `serve_app.errors`.
"""
