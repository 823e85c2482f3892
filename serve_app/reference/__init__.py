"""API reference: declarations of routes, schemas of the answers, the OpenAPI document, and the pages for visitors.

Read `operations.py` first. May import `serve_app.openai`, `serve_app.protocols`.
"""
