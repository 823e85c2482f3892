"""Memory of a 7B-shaped checkpoint in 4 bits, as predicted and as taken: `python -m bench.large_checkpoint`.

The checkpoint is in GPTQ's format, of random numbers, written layer by layer into a temporary directory (4 GB).
`headway serve` serves it, and requests fill the KV cache. The memory taken is that of the replica's process, without
mapped files. Then `headway serve` is asked for more than the machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from bench.record import write
from replicas.engine.config import EngineLimits
from replicas.model.hardware.process_memory import own_bytes
from replicas.model.loading.memory import ReplicaMemory, replica_memory
from replicas.model.loading.options import ModelOptions, RunnerOptions
from serve_app.models.torch_process import run_module
from testkit.free_port import free_port
from testkit.limits import LIMIT_S
from testkit.model.tiny_checkpoints import tiny_tokenizer
from testkit.serving.served import ROOT, Served, clean_environment, serving, wait_for

_GROUP = 128
_MIB = 2**20
_PROMPT_TOKENS, _OUTPUT_TOKENS = 256, 8
_LLAMA_7B = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    vocab_size=32000, max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def write_checkpoint(directory: Path, config: LlamaConfig) -> None:
    """Write a checkpoint with random numbers, one file for each layer."""
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True}
    config.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    size, vocabulary = config.hidden_size, config.vocab_size
    outer = {name: _plain(vocabulary, size) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    files = {"outer": outer | {"model.norm.weight": torch.ones(size, dtype=torch.bfloat16)}}
    names = _write(directory, files)
    for layer in range(config.num_hidden_layers):
        names |= _write(directory, {f"layer-{layer}": _layer(f"model.layers.{layer}", config)})
    index = {"metadata": {}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _write(directory: Path, files: dict[str, dict[str, Tensor]]) -> dict[str, str]:
    for name, tensors in files.items():
        save_file(tensors, directory / f"{name}.safetensors", {"format": "pt"})
    return {tensor: f"{name}.safetensors" for name, tensors in files.items() for tensor in tensors}


def _plain(*shape: int) -> Tensor:
    weight: Tensor = torch.randn(*shape) / shape[-1] ** 0.5
    return weight.to(torch.bfloat16)


def _layer(prefix: str, config: LlamaConfig) -> dict[str, Tensor]:
    size, inner = config.hidden_size, config.intermediate_size
    linears = {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
    linears |= {"mlp.gate_proj": (size, inner), "mlp.up_proj": (size, inner), "mlp.down_proj": (inner, size)}
    tensors = {
        f"{prefix}.{name}.weight": torch.ones(size, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    for name, (num_inputs, num_outputs) in linears.items():
        groups = num_inputs // _GROUP
        words = torch.randint(-(2**31), 2**31 - 1, (num_inputs // 8, num_outputs), dtype=torch.int32)
        scales = torch.full((groups, num_outputs), 0.2 / num_inputs**0.5, dtype=torch.float16)
        zeros = torch.full((groups, num_outputs // 8), 0x77777777, dtype=torch.int32)
        tensors |= {
            f"{prefix}.{name}.{part}": value
            for part, value in (("qweight", words), ("scales", scales), ("qzeros", zeros))
        }
    return tensors


def predicted(directory: Path, arguments: argparse.Namespace) -> ReplicaMemory:
    """Return the memory of a replica as `headway serve` predicts it."""
    options = ModelOptions(str(directory), arguments.dtype, "cpu", 512, arguments.threads)
    limits = EngineLimits(max_num_seqs=arguments.sequences, max_num_batched_tokens=512)
    runner = RunnerOptions(kv_cache_bytes=arguments.kv_cache_mib * _MIB)
    process_bytes = run_module("replicas.model.loading.check_model", str(directory), limit_s=LIMIT_S)
    return replica_memory(directory, options, runner, limits).with_process(int(process_bytes))


def fill(served: Served, num_sequences: int, vocab_size: int) -> None:
    """Run requests at the same time, of different prompts."""

    def ask(number: int) -> None:
        prompt = [3 + (number * 7919 + index * 31) % (vocab_size - 3) for index in range(_PROMPT_TOKENS)]
        body = {"model": "large", "prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "ignore_eos": True}
        httpx.post(f"{served.url}/v1/completions", json=body, timeout=LIMIT_S).raise_for_status()

    with ThreadPoolExecutor(num_sequences) as threads:
        list(threads.map(ask, range(num_sequences)))


def taken_bytes(served: Served) -> int:
    """Return the memory of the replica's process."""
    [replica] = wait_for(served.replicas, "the replica is known")
    found = own_bytes(Path(f"/proc/{replica['pid']}/status"))
    assert found is not None
    return found


def refusal(directory: Path, home: Path) -> dict[str, object]:
    """Return the end of a start that asks for more memory than the machine has."""
    command = [sys.executable, "-m", "serve_app.cli.main", "serve", str(directory), "device=cpu"]
    command += ["--port", str(free_port("127.0.0.1")), "kv_cache_bytes=1024GiB"]
    started_s = time.monotonic()
    environment = clean_environment(home) | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT
    )
    return {
        "seconds": round(time.monotonic() - started_s, 2),
        "exit_status": ended.returncode,
        "last_line": ended.stderr.splitlines()[-1].replace(str(directory), "MODEL"),
    }


def main() -> None:
    """Write, predict, serve, compare, ask for too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="place for 4 GB of files")
    parser.add_argument("--layers", type=int, default=_LLAMA_7B.num_hidden_layers)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--kv-cache-mib", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", help="name of the result file; without one nothing is written")
    arguments = parser.parse_args()
    _LLAMA_7B.num_hidden_layers = arguments.layers
    with tempfile.TemporaryDirectory(prefix="headway-7b-", dir=arguments.directory) as folder:
        figures = measure(Path(folder), arguments)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if arguments.name:
        print(write(arguments.name, figures))


def measure(home: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the figures of a checkpoint that is written into `home`."""
    directory = home / "large"
    directory.mkdir()
    write_checkpoint(directory, _LLAMA_7B)
    refused = refusal(directory, home)
    print(f"refused: {refused}", flush=True)
    needed = predicted(directory, arguments)
    print(f"predicted: {needed}", flush=True)
    settings = (
        f"device=cpu dtype={arguments.dtype} max_model_len=512 num_threads={arguments.threads} "
        f"max_num_seqs={arguments.sequences} max_num_batched_tokens=512 kv_cache_bytes={arguments.kv_cache_mib}MiB"
    )
    started_s = time.monotonic()
    with serving(home, f"MODEL={directory}", f"ARGS={settings}") as served:
        start_s = time.monotonic() - started_s
        loaded = taken_bytes(served)
        fill(served, arguments.sequences, _LLAMA_7B.vocab_size)
        taken = taken_bytes(served)
    return {
        "layers": arguments.layers,
        "predicted_mib": round(needed.total / _MIB),
        "predicted_parts": str(needed),
        "loaded_mib": round(loaded / _MIB),
        "taken_mib": round(taken / _MIB),
        "taken_over_predicted": round(taken / needed.total, 3),
        "start_s": round(start_s, 1),
        "sequences": arguments.sequences,
        "refused": refused,
        "processors": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
