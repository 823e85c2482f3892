"""GGUF files in the kinds that the library `gguf` cannot write: `llama_model_quantize` of llama.cpp's library.

`python -m testkit.model.llama_quantize FILE KIND TO --library DIRECTORY`. The directory has llama.cpp's shared
libraries, built as `bench/peers/README.md` says or from npm: `npm pack @node-llama-cpp/linux-x64@3.22.1`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

KINDS = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_S": 14,
    "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32,
}  # fmt: skip
"""Mixtures of types by name: `llama_ftype` in `llama.h`."""


class _Parameters(ctypes.Structure):
    """The first fields of `llama_model_quantize_params`, and room for the rest."""

    _fields_ = (
        ("num_threads", ctypes.c_int32),
        ("kind", ctypes.c_int),
        ("output_type", ctypes.c_int),
        ("embedding_type", ctypes.c_int),
        ("allows_requantizing", ctypes.c_bool),
        ("rest", ctypes.c_char * 255),
    )


def quantize(file: Path, kind: str, to: Path, libraries: Path) -> Path:
    """Write the model in `file` as `to`, in a kind of `KINDS`.

    Raises:
        OSError: the libraries cannot be loaded, or llama.cpp does not write the file.
    """
    llama = _library(libraries)
    parameters: _Parameters = llama.llama_model_quantize_default_params()
    parameters.num_threads, parameters.kind, parameters.allows_requantizing = 1, KINDS[kind], True
    status = llama.llama_model_quantize(os.fsencode(file), os.fsencode(to), ctypes.byref(parameters))
    if status != 0:
        raise OSError(f"llama.cpp cannot write {to} from {file}: status {status}")
    return to


def _library(libraries: Path) -> ctypes.CDLL:
    """Load the libraries, each before those that need it, and the kernels of the plainest processor."""
    loaded = None
    for pattern in ("libggml-base.so*", "libggml-cpu-x64.so*", "libggml.*so*", "libllama.*so*"):
        found = sorted(libraries.glob(pattern))
        if found:
            loaded = ctypes.CDLL(str(found[0]), ctypes.RTLD_GLOBAL)
    if loaded is None or not hasattr(loaded, "llama_model_quantize"):
        raise OSError(f"{libraries} has no libllama")
    loaded.llama_backend_init()
    if hasattr(loaded, "ggml_backend_load_all_from_path"):
        loaded.ggml_backend_load_all_from_path(os.fsencode(libraries))
    loaded.llama_model_quantize_default_params.restype = _Parameters
    return loaded


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("to", type=Path)
    parser.add_argument("--library", type=Path, required=True, metavar="DIRECTORY")
    options = parser.parse_args()
    quantize(options.file, options.kind, options.to, options.library)
