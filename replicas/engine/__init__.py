"""Engine: continuous batching over a paged KV cache, with the standard library alone.

Read `sequence.py`, `block_manager.py`, `scheduler.py` and `engine.py`, in this order. May import `replicas.block_hash`,
`replicas.clock`, `replicas.cpu_scheduling`, `replicas.errors`, `replicas.fair_share`, `replicas.protocol`,
`replicas.rates`, `replicas.settings`, `replicas.token_ids`.
"""
