"""Loops that move whole batches from state to state.

Read `state_loops.py` first. May import `serve_app.jobs.api`, `serve_app.jobs.jsonl`, `serve_app.jobs.storage`,
`serve_app.wakeup`.
"""
