"""The tokenizer of the applications under test."""

from testkit.http.api import tokenizer

__all__ = ["tokenizer"]
