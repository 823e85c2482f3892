"""Memory of a replica, computed from the checkpoint's files alone."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import GLOBAL_WORKERS

from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.checkpoint.lazy_weights import LazyWeight
from replicas.model.layers.linear import PackedLinear
from replicas.model.loading.config import read_config
from replicas.model.loading.memory import ReplicaMemory, check_memory, replica_memory
from replicas.model.loading.options import ModelOptions, Quantization, RunnerOptions
from replicas.model.loading.weights import load_weights
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import load_compiled
from testkit.model.pooling_checkpoints import PoolingFiles, write_encoder
from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint
from testkit.model.tiny_checkpoints import write_checkpoint

MIB = 2**20


def memory(path: Path, quantization: Quantization = "none") -> ReplicaMemory:
    options = ModelOptions(str(path), dtype="float32", device="cpu", quantization=quantization)
    return replica_memory(path, options, RunnerOptions(), EngineLimits())


@pytest.mark.parametrize("method", ["GPTQ", "compressed-tensors W4A16", "compressed-tensors FP8 dynamic", None])
def test_weights_take_what_was_computed(tmp_path: Path, method: str | None) -> None:
    need_kernels()
    path = cached_checkpoint("llama")
    if method is not None:
        path = quantize_checkpoint(path, tmp_path, METHODS[method])
    parameters = load_compiled(path).model.parameters()
    taken = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    assert memory(path).weights == pytest.approx(taken, rel=0.02)
    assert memory(path).kv_cache == RunnerOptions().kv_cache_bytes


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_an_encoder_has_no_kv_cache_and_no_output_layer(tmp_path: Path, family: str) -> None:
    need_kernels()
    path = write_encoder(tmp_path, family, PoolingFiles("mean"))
    model = load_compiled(path).model
    plain = [*model.parameters(), *(part.weight for part in model.modules() if isinstance(part, PackedLinear))]
    taken = sum(weight.numel() * weight.element_size() for weight in plain)
    assert memory(path).weights == pytest.approx(taken, rel=0.05)
    assert memory(path).kv_cache == 0 and "none of KV cache" in str(memory(path))


def test_only_a_decoder_that_generates_has_a_copy_of_its_embedding(tmp_path: Path) -> None:
    """The same weights as a decoder that generates, and as one that only embeds."""
    need_kernels()
    path = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    copy = config["vocab_size"] * config["hidden_size"]
    generating = memory(path)
    PoolingFiles().write(path, config["hidden_size"])
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    assert memory(path).weights == generating.weights - 4 * copy
    taken = sum(parameter.numel() * parameter.element_size() for parameter in load_compiled(path).model.parameters())
    assert memory(path).weights == pytest.approx(taken, rel=0.02)


def test_weights_of_4_bits_that_are_rounded_again_are_dense(tmp_path: Path) -> None:
    path = quantize_checkpoint(cached_checkpoint("llama"), tmp_path, METHODS["AWQ"])
    assert memory(path, "int8").weights == memory(cached_checkpoint("llama")).weights > memory(path).weights


def test_too_much_is_refused_with_the_nearest_setting_that_fits(tmp_path: Path) -> None:
    needed = ReplicaMemory(weights=1000 * MIB, kv_cache=512 * MIB, activations=0, process=500 * MIB)
    check_memory(needed, tmp_path, needed.total)
    for available, num_replicas, remedy in (
        (1800 * MIB, 1, "it fits with kv_cache_bytes=300MiB"),
        (3600 * MIB, 2, "it fits with kv_cache_bytes=300MiB"),
        (4100 * MIB, 3, "it fits with num_replicas=2"),
        (1500 * MIB, 1, "choose a smaller model"),
    ):
        with pytest.raises(
            ModelLoadError, match=r"needs 2\.0 GiB.*1\.0 GiB of weights.* of memory are free; " + remedy
        ):
            check_memory(needed, tmp_path, available, num_replicas)


class HostBytes:
    """Bytes of the weights that were read and are still on the host."""

    def __init__(self) -> None:
        self.now, self.peak = 0, 0
        self.sizes: list[int] = []
        """Of all weights that were read."""

    def read(self, weight: LazyWeight) -> Tensor:
        found = weight._read().clone()
        self._change(found.nbytes)
        self.sizes.append(found.nbytes)
        weakref.finalize(found, self._change, -found.nbytes)
        return found

    def _change(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


def test_weights_go_to_their_device_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host holds one weight for each thread of transformers' loader, never the whole model.

    A meta device takes a GPU's place: what is there is not on the host.
    """
    host = HostBytes()
    monkeypatch.setattr(LazyWeight, "__getitem__", lambda weight, _: host.read(weight))
    path = cached_checkpoint("llama")
    loaded = load_weights(str(path), read_config(str(path)), torch.float32, torch.device("meta"))
    assert {tensor.device.type for tensor in loaded.model.state_dict().values()} == {"meta"}
    assert sum(host.sizes) == sum(weight.nbytes for weight in loaded.model.state_dict().values())
    assert host.peak <= sum(sorted(host.sizes)[-GLOBAL_WORKERS:]) < sum(host.sizes) / 2
