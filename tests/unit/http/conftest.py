"""The HTTP application over a scripted replica."""

from testkit.http.api import api, make_api, script, tokenizer

__all__ = ["api", "make_api", "script", "tokenizer"]
