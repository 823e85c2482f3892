"""Storage of files' bytes, on a disk or in an object store.

Read `store.py` first. May import `replicas.timing`, `serve_app.jobs.api`.
"""
