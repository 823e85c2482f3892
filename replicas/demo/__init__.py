"""The bundled demo model: weights, tokenizer and model card; `testkit/demo_model` has the scripts that made them.

May import nothing.
"""

from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
"""Folder of the model, for `from_pretrained`."""
