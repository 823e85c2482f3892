"""Autoscaling on drain time: the work that waits everywhere, and the replicas it needs.

Read `autoscaling.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.rates`, `replicas.settings`,
`router.balancing`, `router.flow`, `router.types`.
"""
