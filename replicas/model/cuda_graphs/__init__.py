"""CUDA graphs of steps, padded to a few sizes.

Read `graphs.py` first. May import `replicas.engine`, `replicas.errors`, `replicas.model.attention`,
`replicas.model.batch`, `replicas.model.loading`, `replicas.model.sampling`.
"""
