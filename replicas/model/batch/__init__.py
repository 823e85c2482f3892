"""The tensors of a step, and their one copy to the device and back.

Read `inputs.py` first. May import `replicas.engine`, `replicas.protocol`.
"""
