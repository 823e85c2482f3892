"""What routing promises, measured: one experiment a module, each `python -m bench.routing.<name> [--quick]`."""
