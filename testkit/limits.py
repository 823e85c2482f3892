"""Time limits of waits in tests. They are generous: tests check that something happens, not how fast."""

LIMIT_S = 300.0
"""Limit in seconds for an answer or a change of state."""
START_LIMIT_S = 900.0
"""Limit in seconds for starting an application: imports, a Ray cluster, the first compilation of kernels."""
