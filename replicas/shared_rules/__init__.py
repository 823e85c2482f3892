"""Rules that ingresses and engines both apply: hashes of token blocks, and checks of token ids.

Each module stands alone. May import `replicas.errors`, `replicas.protocol`.
"""
