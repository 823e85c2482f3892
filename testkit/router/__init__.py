"""Simulated replicas, requests and time."""
