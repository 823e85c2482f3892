"""Migrations of the database, run by Alembic.

Read `env.py` first. May import `serve_app.jobs.storage`.
"""
