"""Check of a checkpoint by transformers: `python -m replicas.model.loading.check_model DIRECTORY`.

The program fails, and its last line says why, if the model cannot be served. Otherwise it prints `ModelFacts` in one
line. It reads no values of weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import torch

from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.kv_cache import with_cache
from replicas.model.attention.layer_groups import bytes_of_block, group_layers
from replicas.model.attention.probe import probe_shapes
from replicas.model.hardware.limits import unshared_bytes
from replicas.model.layers.latent_attention import store_latents
from replicas.model.loading.config import read_config
from replicas.model.loading.facts import ModelFacts
from replicas.model.loading.weights import check_shapes
from replicas.model.pooling.kinds import is_two_sided


def check_model(directory: Path) -> ModelFacts:
    """Check that transformers knows the model, and that the checkpoint has all its weights in their shapes.

    Raises:
        ModelLoadError: it does not, or has not.
    """
    config = read_config(str(directory.resolve()))
    model = check_shapes(directory, config)
    store_latents(model)
    port = AttentionPort(model)
    two_sided = is_two_sided(config)
    layers = probe_shapes(model, port, two_sided=two_sided)
    # Only here: a refusal needs no more libraries.
    from replicas.model.loading.loader import longest_of
    from replicas.model.loading.vocabulary import tokenizer_of

    tokenizer = tokenizer_of(str(directory))  # Kept, since the process's memory counts.
    process_bytes = unshared_bytes(psutil.Process())
    del tokenizer
    if layers is None or two_sided:
        return ModelFacts(process_bytes, longest_of(config))
    cached = with_cache(layers)
    states = port.recurrent.layers
    longest = longest_of(config)
    groups, quantized = (group_layers(layers, longest or sys.maxsize, dtype) for dtype in (torch.bfloat16, torch.int8))
    num_table_numbers = bytes_of_block(groups, 1, torch.bfloat16) // torch.bfloat16.itemsize
    num_scale_bytes = bytes_of_block(quantized, 1, torch.int8) - num_table_numbers
    return ModelFacts(
        process_bytes,
        longest,
        sum(layer.num_numbers for layer in cached),
        sum(layer.num_scales for layer in cached),
        sum(layer.num_heads * layer.key_size * layer.value_size for layer in states),
        sum(layer.tail_numbers for layer in states),
        sum((layer.conv_width - 1) * layer.num_channels for layer in states),
        sum(layer.num_channels for layer in states),
        tuple(group.window for group in groups),
        num_table_numbers,
        num_scale_bytes // torch.float32.itemsize if len(quantized) == len(groups) else None,
    )


if __name__ == "__main__":
    try:
        print(check_model(Path(sys.argv[1])).write())
    except ModelLoadError as error:
        sys.exit(str(error))
