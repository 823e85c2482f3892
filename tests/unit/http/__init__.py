"""HTTP layer: exchanges, bodies, headers, limits, other origins, real connections."""
