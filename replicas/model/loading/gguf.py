"""Conversion of a GGUF file into a checkpoint of safetensors: `python -m replicas.model.loading.gguf FILE DIRECTORY`.

The weights are dequantized and written in bfloat16. transformers reads the file: config, weights, tokenizer and chat
template.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(file: Path, directory: Path) -> None:
    """Write the model in `file` to `directory`, which must exist.

    Raises:
        OSError, ValueError, KeyError: transformers cannot read the file.
    """
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are plain now; with these marks transformers would refuse to save them.
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(directory)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(" ".join(str(error).split()) or repr(error))
