"""Continuous batching over a paged KV cache: pure scheduling, standard library only."""
