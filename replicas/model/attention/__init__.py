"""The seam to transformers' attention, the paged KV cache, and the backends over it.

Read `interface.py` first, then `gather.py`. May import `replicas.engine`, `replicas.errors`, `replicas.model.batch`,
`replicas.model.hardware`.
"""
