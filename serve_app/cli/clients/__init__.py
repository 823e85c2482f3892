"""Commands that use a server, here or elsewhere: their requests to it, and their output on the terminal.

Read `client.py` first. May import `replicas.protocol`, `serve_app.benchmark`.
"""
