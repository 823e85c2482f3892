"""The HTTP endpoints: each turns requests into calls of the parts below and results into responses."""
