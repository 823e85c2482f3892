"""Time from the start of a process to the first token of a model's checkpoint, with what took it.

`measure_first_answers` writes a checkpoint of random weights and starts this program twice, without Ray: first with an
empty cache of Triton's kernels, then with the one that the first run has filled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from bench.engine.engines import exact_request, make_engine, pseudo_random_tokens
from bench.gpu.device_time import release
from replicas.engine.config import EngineLimits
from replicas.model.build import build_fitted, warm_up
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import ModelOptions, RunnerOptions

_LIMITS = EngineLimits(max_num_seqs=256, max_num_batched_tokens=2048)
_TINY_LIMITS = EngineLimits(max_num_seqs=2, max_num_batched_tokens=64)
_SHARD = "4GB"
_PROMPT = 32
_LIMIT_S = 200.0
ALL = "all"
"""Name of the time from the start of the process to the first token."""


def measure_first_answers(
    config: PretrainedConfig, dtype: torch.dtype, device: str, *, is_tiny: bool
) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase and of all together, with an empty cache of kernels and with a filled one.

    The checkpoint has just been written, so its pages are in memory.
    """
    with tempfile.TemporaryDirectory(prefix="hw-first-") as folder:
        model, kernels = Path(folder) / "model", Path(folder) / "kernels"
        with torch.device(device):
            AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(model, max_shard_size=_SHARD)
        release()
        return {name: _first_answer(model, device, kernels, is_tiny=is_tiny) for name in ("empty", "filled")}


def _first_answer(model: Path, device: str, kernels: Path, *, is_tiny: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.gpu.first_answer", "--model", str(model), "--device", device]
    command += ["--started", repr(time.monotonic()), *(["--tiny"] if is_tiny else [])]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kernels)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    """Load a model, compute one token, and print the seconds of each phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of the checkpoint")
    parser.add_argument("--device", required=True)
    parser.add_argument("--started", type=float, required=True, help="monotonic time at which the process was started")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    limits = _TINY_LIMITS if options.tiny else _LIMITS
    moments = {"imports": time.monotonic()}
    loaded = load_model(ModelOptions(options.model, device=options.device, kernel_cache_dir=None))
    moments["weights"] = time.monotonic()
    fitted = build_fitted(loaded, limits, RunnerOptions(kv_cache_bytes=2**24))  # On a GPU it takes what is left.
    moments["memory and graphs"] = time.monotonic()
    warm_up(fitted.runner, fitted.limits)
    moments["first steps"] = time.monotonic()
    engine = make_engine(fitted.runner, max_num_seqs=1, max_num_batched_tokens=limits.max_num_batched_tokens)
    engine.add(exact_request("first", pseudo_random_tokens(1, _PROMPT), 1))
    while not any(delta.token_ids for delta in engine.step()):
        pass
    moments["first token"] = time.monotonic()
    starts = [options.started, *moments.values()]
    seconds = {name: end - start for (name, end), start in zip(moments.items(), starts, strict=False)}
    print(json.dumps({ALL: starts[-1] - starts[0], **seconds}))


if __name__ == "__main__":
    main()
