"""Model replica: a model, the engine that schedules its requests, and the object around both.

Read `protocol.py` first, then `engine/`.
"""
