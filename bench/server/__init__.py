"""A served application: its CPU time, its memory, its start, and floods of requests."""
