"""HTTP layer: request bodies, uploads, streamed responses, disconnects, time-outs and headers.

Read `exchange.py` first. May import `replicas.errors`, `replicas.protocol`, `replicas.settings`, `replicas.timing`,
`router.timeline`, `router.types`, `serve_app.errors`, `serve_app.keys`, `serve_app.monitoring`,
`serve_app.openai.reply`, `serve_app.openai.request`, `serve_app.openai.tokenize`, `serve_app.openai.tools`,
`serve_app.tracing`.
"""
