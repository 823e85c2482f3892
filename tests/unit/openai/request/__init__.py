"""Bodies and headers of requests: what they mean, and what is refused."""
