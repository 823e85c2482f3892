"""Memory of a 7B-shaped checkpoint in 4 bits, as predicted and as taken: `python -m bench.large_checkpoint`.

The checkpoint is in GPTQ's format, of random numbers, written layer by layer into a temporary directory (4 GB). A
replica's model is loaded from it in this process and generates tokens. The memory taken is the process's own, without
mapped files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from bench.engines import load_runner, make_engine
from bench.peers.engine import equal_requests
from bench.peers.headway_engine import run_engine
from bench.record import write
from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.loading.memory import ReplicaMemory, check_memory, replica_memory
from replicas.model.loading.options import ModelOptions, RunnerOptions

_GROUP = 128
_MIB = 2**20
_LLAMA_7B = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    vocab_size=32000, max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def write_checkpoint(directory: Path, config: LlamaConfig) -> None:
    """Write a checkpoint with random numbers, one file for each layer."""
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True}
    config.save_pretrained(directory)
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


def own_bytes() -> int:
    """Return the memory of this process, without files that it maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def refusal(needed: ReplicaMemory, directory: Path) -> str:
    """Return the words with which the checkpoint is refused where a byte is missing."""
    try:
        check_memory(needed, directory, needed.total - 1)
    except ModelLoadError as error:
        return str(error)
    raise AssertionError("the checkpoint was not refused")


def main() -> None:
    """Write, predict, load, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="place for 4 GB of files")
    parser.add_argument("--layers", type=int, default=_LLAMA_7B.num_hidden_layers)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--kv-cache-mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", help="name of the result file; without one nothing is written")
    arguments = parser.parse_args()
    _LLAMA_7B.num_hidden_layers = arguments.layers
    directory = Path(tempfile.mkdtemp(prefix="headway-7b-", dir=arguments.directory))
    try:
        write_checkpoint(directory, _LLAMA_7B)
        options = ModelOptions(str(directory), "bfloat16", "cpu", 1024, arguments.threads)
        limits = EngineLimits(max_num_seqs=arguments.sequences, max_num_batched_tokens=512)
        runner_options = RunnerOptions(kv_cache_bytes=arguments.kv_cache_mib * _MIB)
        started_s = time.perf_counter()
        needed = replica_memory(directory, options, runner_options, limits)
        predicted_s = time.perf_counter() - started_s
        print(f"predicted in {predicted_s:.2f} s: {needed}; with less: {refusal(needed, directory)}", flush=True)
        started_s = time.perf_counter()
        runner = load_runner(options, limits, arguments.kv_cache_mib)
        loaded_s = time.perf_counter() - started_s
        engine = make_engine(runner, max_num_seqs=arguments.sequences, max_num_batched_tokens=512)
        events = run_engine(engine, equal_requests(arguments.sequences, 256, 8, seed=1))
        figures = {
            "layers": arguments.layers,
            "predicted_mib": round(needed.total / _MIB),
            "predicted_parts": str(needed),
            "taken_mib": round(own_bytes() / _MIB),
            "taken_over_predicted": round(own_bytes() / needed.total, 3),
            "prediction_s": round(predicted_s, 3),
            "load_s": round(loaded_s, 1),
            "run_s": round(events.ended_s - events.started_s, 1),
            "sequences": arguments.sequences,
        }
    finally:
        shutil.rmtree(directory)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if arguments.name:
        print(write(arguments.name, figures))


if __name__ == "__main__":
    main()
