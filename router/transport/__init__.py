"""Ingress side of the wire: channels to the replicas, and the calls that submit requests.

Read `channel.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.transport`.
"""
