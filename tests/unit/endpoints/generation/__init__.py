"""Completions over HTTP, their streams, and single requests by their id."""
