"""Tensor parallelism: shares of a model's heads, rows and columns, and the collectives that join their results.

Read `shares.py` first, then `joined_layers.py`. May import `replicas.errors`, `replicas.model.checkpoint`,
`replicas.model.layers`.
"""
