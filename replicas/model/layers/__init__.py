"""Fused and compiled replacements of transformers' layers.

Read `interface.py` first, then `optimize.py`. May import `replicas.errors`, `replicas.model.attention`,
`replicas.model.hardware`.
"""
