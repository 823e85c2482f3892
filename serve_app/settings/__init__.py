"""Types of the configuration: settings by band, the settings of each process, former settings, and options of vLLM's.

Read `processes.py` first. May import `replicas.options`, `replicas.protocol`, `router`, `serve_app.http`,
`serve_app.jobs.api`, `serve_app.openai.request`, `serve_app.openai.tokenize`, `serve_app.tracing`.
"""
