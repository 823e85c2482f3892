"""Why a model cannot be served; raised at start-up, before any request exists."""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model's files or options cannot be used; the message names what is wrong with them."""


class UnsupportedModel(ModelLoadError):
    """The model's code cannot run over a paged KV cache in a flat batch."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(model_type, reason)
        self.model_type = model_type
        self.reason = reason

    def __str__(self) -> str:
        return f"models of type {self.model_type!r} cannot be served: {self.reason}"
