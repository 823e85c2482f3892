"""Ray Serve application: HTTP API, deployments, asynchronous jobs, configuration and command line.

Read `app.py` first.
"""
