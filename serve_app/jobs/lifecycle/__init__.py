"""Loops that move whole batches from state to state, with the checks of their input files (JSONL).

Read `state_loops.py` first. May import `replicas.errors`, `replicas.protocol`, `serve_app.errors`,
`serve_app.jobs.api`, `serve_app.jobs.storage`, `serve_app.openai.request`, `serve_app.wakeup`.
"""
