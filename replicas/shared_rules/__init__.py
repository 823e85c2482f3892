"""Rules that ingresses and engines both apply: hashes of token blocks, checks of token ids, fair shares of slots.

Each module stands alone. May import `replicas.errors`, `replicas.protocol`.
"""
