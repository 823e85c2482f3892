"""Ranks of a replica: processes that each compute a part of the model, and run the steps that the first one plans.

Read `messages.py` first, then `leading_runner.py`, `ring.py` and `parts.py`. May import `replicas.engine`,
`replicas.errors`, `replicas.model`.
"""
