"""Tokens and their text, and the threads and processes that do the work."""
