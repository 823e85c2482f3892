"""Flow control: admission, queues by band and tenant, and late binding to replicas.

Read `flow_control.py` first. May import `replicas.block_hash`, `replicas.errors`, `replicas.protocol`,
`replicas.rates`, `replicas.settings`, `router.balancing`, `router.timeline`, `router.types`.
"""
