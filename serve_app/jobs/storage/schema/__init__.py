"""Schema of the database: its tables, its migrations, and access to it through thread pools.

Read `tables.py` first. May import `replicas.timing`, `serve_app.jobs.api`, `serve_app.jobs.files`.
"""
