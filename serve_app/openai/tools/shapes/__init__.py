"""Shapes of tool calls in a model's text: each reads calls, writes them, and binds them with a grammar.

Read `shape.py` first. May import nothing of the product.
"""
