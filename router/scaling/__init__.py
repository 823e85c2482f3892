"""Autoscaling by drain time: the number of replicas that the waiting work needs.

Read `autoscaling.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.settings`, `replicas.timing`,
`router.balancing`, `router.flow`, `router.types`.
"""
