"""The Ray Serve application: HTTP, deployments, and asynchronous jobs.

Read `app.py` first.
"""
