"""Test kit for tests and benchmarks: fakes with behaviour, simulated time, tiny models, served applications."""
