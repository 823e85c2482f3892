"""Monitoring: the metrics of each part, their page for Prometheus, their export to Ray, and Grafana's dashboards.

Read `page.py` first. May import `replicas.engine`, `replicas.errors`, `replicas.protocol`, `router.balancing`,
`router.dispatch`, `router.flow`, `router.scaling`, `router.timeline`, `router.types`.
"""
