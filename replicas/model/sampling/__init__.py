"""Sampling: tokens and log probabilities from logits.

Read `sampler.py` first. May import `replicas.engine`, `replicas.model.batch`, `replicas.model.hardware`,
`replicas.model.parallel`, `replicas.protocol`.
"""
