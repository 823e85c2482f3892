"""OpenAI's API on the engine's types, without HTTP.

Read `service.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.text`, `router.dispatch`,
`router.timeline`, `router.types`.
"""
