"""Pooling: hidden states of a text become an embedding or scores, as the checkpoint's files say.

Read `heads.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.text`.
"""
