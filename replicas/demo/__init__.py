"""The bundled demo model: weights, tokenizer, model card and the scripts that made them."""

from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
"""Folder of the model, for `from_pretrained`."""
