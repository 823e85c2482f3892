"""Replies of OpenAI's API, whole and streamed, built from the engine's deltas.

Read `format.py` first. May import `replicas.errors`, `replicas.protocol`, `router.dispatch`,
`router.timeline`, `serve_app.openai.request`, `serve_app.openai.tokenize`, `serve_app.openai.tools`.
"""
