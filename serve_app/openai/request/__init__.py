"""Schemas of request bodies, and their validation into `GenerateRequest`.

Read `conversation.py` and `schema.py` first, then `validation.py`. May import `replicas.errors`, `replicas.protocol`,
`replicas.settings`, `replicas.shared_rules`, `replicas.text`, `router.timeline`, `serve_app.errors`, `serve_app.keys`.
"""
