"""Measurements: each prints a table and writes its figures, with commit and machine, to bench/results."""
