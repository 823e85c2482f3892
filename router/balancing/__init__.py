"""Load balancing: each replica's load, the prefixes it holds, and policies that rank replicas.

Read `policy.py` first. May import `replicas.protocol`, `router.slot_shares`, `router.types`.
"""
