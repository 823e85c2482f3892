"""Inputs of a step as tensors, and their transfers: one copy to the device, one wait for the results.

Read `inputs.py` first. May import `replicas.engine`, `replicas.protocol`.
"""
