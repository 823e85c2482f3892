"""Replica side of the wire: channels to the ingresses, and the values that cross.

Read `wire.py` first. May import `replicas.engine`, `replicas.errors`, `replicas.protocol`.
"""
