"""Databases, a jobs process without Ray, and receivers of webhooks."""
