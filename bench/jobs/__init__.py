"""Experiments on jobs and batches; each is a program, `python -m bench.jobs.submit [--quick]`."""
