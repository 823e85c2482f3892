"""Logits become tokens and log probabilities.

Read `sampler.py` first. May import `replicas.engine`, `replicas.model.batch`, `replicas.protocol`.
"""
