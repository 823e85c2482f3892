"""Our engine beside other serving engines on one workload; the driver needs the standard library only."""
