"""Engine: continuous batching over a paged KV cache, with the standard library and numpy.

Read `sequence.py`, `sequence_table.py`, `block_manager.py`, `scheduler.py` and `engine.py`, in this order.

May import `replicas.errors`, `replicas.protocol`, `replicas.settings`, `replicas.shared_rules`, `replicas.timing`.
"""
