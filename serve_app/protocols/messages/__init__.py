"""Anthropic's Messages as chats: bodies in, and answers' blocks and events out.

Read `schema.py` first. May import `replicas.errors`, `replicas.protocol`, `serve_app.errors`, `serve_app.openai`,
`serve_app.protocols`.
"""
