"""The parts of a server in the foreground."""
