"""OpenAI's API on the engine's types, without HTTP.

Read `service.py` first. May import `replicas.errors`, `replicas.grammar`, `replicas.protocol`,
`replicas.tokenizer_files`, `router.dispatch`, `router.timeline`, `router.types`.
"""
