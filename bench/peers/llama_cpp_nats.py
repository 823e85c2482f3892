"""Surprise of texts in llama.cpp: `python -m bench.peers.llama_cpp_nats FILE < texts.json > nats.json`.

It runs in an environment with `llama-cpp-python`, reads lists of token ids, and prints for each one the sum of
-log p over all tokens but the first, in nats.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np


def nats(model: Any, token_ids: list[int]) -> float:
    """Return the sum over all tokens but the first."""
    given, targets = token_ids[:-1], token_ids[1:]
    model.reset()
    model.eval(given)
    logits = np.asarray(model.scores[: len(given)], dtype=np.float64)
    most = logits.max(axis=1)
    norms = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
    return float((norms - logits[np.arange(len(targets)), targets]).sum())


def _model_class() -> Any:
    """Return the class of models. Kernels that lay weights out anew are off: those for AMX crash in some machines."""
    library: Any = importlib.import_module("llama_cpp.llama_cpp")
    defaults = library.llama_model_default_params

    def parameters() -> Any:
        made = defaults()
        made.use_extra_bufts = False
        return made

    library.llama_model_default_params = parameters
    return importlib.import_module("llama_cpp").Llama


def main() -> None:
    """Read, compute, print."""
    texts = json.load(sys.stdin)
    context = max(map(len, texts))
    model = importlib.import_module("llama_cpp").Llama(
        sys.argv[1], n_ctx=context, n_batch=context, logits_all=True, verbose=False
    )
    print(json.dumps([nats(model, token_ids) for token_ids in texts]))


if __name__ == "__main__":
    main()
