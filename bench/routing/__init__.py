"""Experiments on routing, each with its pass bars: `python -m bench.routing.<name> [--quick]`."""
