"""Tiny checkpoints, batches over a paged cache, and the engine driven without a thread."""
