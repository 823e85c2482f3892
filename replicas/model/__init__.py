"""The model runner: runs an engine's scheduled batches with one model on one device.

Read `runner.py` and `planner.py` first. May import `replicas.engine`, `replicas.errors`.
"""
