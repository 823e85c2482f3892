"""Input files in JSONL: splitting into lines, checking them, and estimating their cost.

Read `checker.py` first. May import `replicas.errors`, `serve_app.errors`, `serve_app.jobs.api`,
`serve_app.openai.request`.
"""
