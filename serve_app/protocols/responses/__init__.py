"""OpenAI's Responses as chats: bodies in, and output items and events out.

Read `schema.py` first. May import `replicas.errors`, `replicas.protocol`, `serve_app.errors`, `serve_app.openai`,
`serve_app.protocols`.
"""
