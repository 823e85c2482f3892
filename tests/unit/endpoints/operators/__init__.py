"""Probes, metrics, the dashboard and the usage."""
