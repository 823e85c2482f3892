"""Faster replacements of transformers' layers: fused, compiled and quantized.

Read `ops.py` first, then `optimize.py`. May import `replicas.errors`, `replicas.model.attention`,
`replicas.model.checkpoint`, `replicas.model.hardware`.
"""
