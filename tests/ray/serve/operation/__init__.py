"""Prometheus and Ray's dashboard over a served application."""
