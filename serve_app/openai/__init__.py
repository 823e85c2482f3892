"""OpenAI's API on the engine's types, without HTTP.

Read `service.py` first. May import `replicas.errors`, `replicas.grammar`, `replicas.protocol`, `router.dispatch`,
`router.timeline`, `router.types`.
"""
