"""Attention: the interface to transformers' model code, the paged KV cache and the attention backends over it.

Read `interface.py` first, then `gather.py`. May import `replicas.engine`, `replicas.errors`, `replicas.model.batch`,
`replicas.model.hardware`.
"""
