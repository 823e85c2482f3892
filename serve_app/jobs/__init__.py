"""Asynchronous jobs and batches: accepted once, kept in a database, never lost."""
