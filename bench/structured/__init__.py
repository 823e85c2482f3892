"""Structured outputs: validity, cost of their grammars, and replicas that are killed."""
