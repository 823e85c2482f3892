"""Tool calls and reasoning of chat models: one description per family of chat templates.

A description drives the parser of the output, the grammar that makes calls valid, and the prompt of earlier calls.
Read `families.py` first, then `parser.py`. May import `replicas.errors`.
"""
