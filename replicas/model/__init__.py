"""One model on one device: runs scheduled batches.

Read `runner.py` first. May import `replicas.engine`, `replicas.errors`, `replicas.protocol`.
"""
