"""Engine: continuous batching over a paged KV cache, with the standard library alone.

Read `sequence.py`, `block_manager.py`, `scheduler.py` and `engine.py`, in this order. May import `replicas.errors`,
`replicas.protocol`, `replicas.settings`, `replicas.shared_rules`, `replicas.timing`.
"""
