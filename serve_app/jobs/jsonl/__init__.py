"""Input files in JSONL: split into lines, check, estimate the cost.

Read `checker.py` first. May import `replicas.errors`, `serve_app.errors`, `serve_app.jobs.api`,
`serve_app.openai.request`.
"""
