"""Flow control: admission, queues by band and tenant, and late binding to replicas.

Read `flow_control.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.settings`,
`replicas.shared_rules`, `replicas.timing`, `router.balancing`, `router.timeline`, `router.types`.
"""
