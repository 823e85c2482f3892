"""Protocols of agents, as chats: bodies in, and answers and events out, as pure functions.

Read `adapted_chat.py` first. May import `replicas.errors`, `serve_app.openai`.
"""
