"""Chat templates and tokenization in worker threads, and in processes for large work of less urgent bands.

Read `prompt_encoder.py` first, then `prompt_tokenizer.py` and `work_queue.py`. May import `replicas.errors`,
`replicas.protocol`, `replicas.text`, `serve_app.errors`, `serve_app.openai.request`, `serve_app.openai.tools`,
`serve_app.process`.
"""
