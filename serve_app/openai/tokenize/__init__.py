"""Chat templates and tokenization in worker threads.

Read `prompt_tokenizer.py` first, then `work_queue.py`. May import `replicas.errors`, `replicas.protocol`,
`replicas.tokenizer_files`, `serve_app.errors`, `serve_app.openai.request`, `serve_app.openai.tools`.
"""
