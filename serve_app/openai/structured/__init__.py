"""Structured outputs: the grammar that a request's fields ask for.

Read `output_grammar.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.text`, `serve_app.errors`,
`serve_app.openai.request`, `serve_app.openai.tokenize`, `serve_app.openai.tools`.
"""
