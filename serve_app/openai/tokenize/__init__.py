"""Chat templates and tokenization in worker threads.

Read `prompt_tokenizer.py` first. May import `replicas.errors`, `replicas.tokenizer_files`, `serve_app.errors`,
`serve_app.openai.request`, `serve_app.openai.tools`.
"""
