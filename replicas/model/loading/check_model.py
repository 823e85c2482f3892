"""Check of a checkpoint by transformers: `python -m replicas.model.loading.check_model DIRECTORY`.

The program fails, and its last line says why, if the model cannot be served. Otherwise it prints `ModelFacts` in one
line. It reads no values of weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.kv_cache import with_cache
from replicas.model.attention.probe import probe_shapes
from replicas.model.hardware.limits import unshared_bytes
from replicas.model.layers.latent_attention import store_latents
from replicas.model.loading.config import read_config
from replicas.model.loading.facts import ModelFacts
from replicas.model.loading.weights import check_shapes


def check_model(directory: Path) -> ModelFacts:
    """Check that transformers knows the model, and that the checkpoint has all its weights in their shapes.

    Raises:
        ModelLoadError: it does not, or has not.
    """
    config = read_config(str(directory.resolve()))
    model = check_shapes(directory, config)
    store_latents(model)
    port = AttentionPort(model)
    layers = probe_shapes(model, port)
    from replicas.model.loading.loader import longest_of, tokenizer_of  # Only here: a refusal needs no more libraries.

    tokenizer = tokenizer_of(str(directory))  # Kept, since the process's memory counts.
    process_bytes = unshared_bytes(psutil.Process())
    del tokenizer
    if layers is None:
        return ModelFacts(process_bytes, longest_of(config))
    cached = with_cache(layers)
    states = port.recurrent.layers
    return ModelFacts(
        process_bytes,
        longest_of(config),
        sum(layer.num_numbers for layer in cached),
        sum(layer.num_scales for layer in cached),
        sum(layer.num_heads * layer.key_size * layer.value_size for layer in states),
        sum(layer.tail_numbers for layer in states),
        sum((layer.conv_width - 1) * layer.num_channels for layer in states),
        sum(layer.num_channels for layer in states),
    )


if __name__ == "__main__":
    try:
        print(check_model(Path(sys.argv[1])).write())
    except ModelLoadError as error:
        sys.exit(str(error))
