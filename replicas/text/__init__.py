"""Text side of a model, without torch: its tokenizer, its small files, and the grammars of its outputs.

Read `tokenizer_files.py` first. May import `replicas.errors`, `replicas.protocol`.
"""
