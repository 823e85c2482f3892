"""Migrations of the database, run by alembic.

Read `env.py` first. May import `serve_app.jobs.storage`.
"""
