"""Load generator for any OpenAI-compatible server: its requests, their times, and figures, tables and plots of them.

Read `run.py` first. May import `replicas.protocol`.
"""
