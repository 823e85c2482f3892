"""Checkpoints on disk: headers of their files, formats of quantized weights, and weights read one by one.

Read `headers.py` and `formats.py`, which import no torch, then `quantized_linear.py`. May import `replicas.errors`.
"""
