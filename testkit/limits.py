"""How long tests wait for what must happen: they say what comes, never how fast, on however busy a machine."""

LIMIT_S = 300.0
"""For an answer, or a change of state."""
START_LIMIT_S = 900.0
"""For an application, from nothing: imports, a Ray cluster, the first compilation of kernels."""
