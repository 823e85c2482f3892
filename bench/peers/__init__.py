"""Headway beside other serving engines on one workload; the driver needs only the standard library."""
