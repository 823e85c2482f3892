"""Options of `headway serve`: of each field of the configuration, and vLLM's; and their help.

Read `config_options.py` first. May import `serve_app.config`, `serve_app.config_page`, `serve_app.preflight`,
`serve_app.settings`.
"""
