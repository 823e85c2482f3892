"""The Ray Serve application: HTTP in, wiring, configuration."""
