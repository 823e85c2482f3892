"""Tests of the protocols of agents."""
