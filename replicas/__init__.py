"""A model, the engine that schedules its requests, and the replica around both.

Read `protocol.py` first, then `engine/`.
"""
