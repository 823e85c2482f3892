"""Requests of clients to a served application."""
