"""Loading of a model directory with options, and refusals of those that cannot be served."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError, UnsupportedModel
from replicas.model.attention.interface import ATTENTION_NAME, AttentionPort
from replicas.model.attention.kv_cache import AttentionLayer, KVCache, bytes_per_block
from replicas.model.attention.probe import probe_attention
from replicas.model.batch.inputs import dummy_batches
from replicas.model.build import build_runner, warm_up
from replicas.model.hardware.device import choose_device, choose_dtype
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.runner import TorchModelRunner
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import random_model
from testkit.model.tiny_checkpoints import (
    ARCHITECTURES,
    REFUSED,
    VOCAB_SIZE,
    tiny_tokenizer,
    write_checkpoint,
    write_refused_checkpoint,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama() -> Path:
    return cached_checkpoint("llama", with_tokenizer=True)


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_loaded_model_describes_itself(tmp_path: Path) -> None:
    loaded = load_model(ModelOptions(str(write_checkpoint(tmp_path, "llama", eos_token_id=2)), dtype="float32"))
    assert (loaded.max_model_len, loaded.vocab_size) == (512, 512)
    assert (loaded.eos_token_ids, loaded.dtype, loaded.device) == (frozenset({2}), torch.float32, CPU)
    assert loaded.tokenizer is not None and loaded.tokenizer.decode([3]) == tiny_tokenizer().decode([3])
    assert loaded.layers == tuple(AttentionLayer(index, 4, 2, 16, 16, None, None, False) for index in range(3))


def test_probe_finds_windows_caps_sinks_and_unequal_heads(tmp_path: Path) -> None:
    def layers(architecture: str):
        return load_model(ModelOptions(str(write_checkpoint(tmp_path / architecture, architecture)))).layers

    assert {layer.window for layer in layers("gemma2-window")} == {24, None}
    assert layers("gemma2-window")[0].softcap == 5.0
    assert all(layer.has_sinks for layer in layers("gpt_oss-window"))
    assert (layers("deepseek_v3")[0].key_size, layers("deepseek_v3")[0].value_size) == (48, 32)


@pytest.mark.parametrize("eos", [2, [2, 7]])
def test_generation_config_decides_the_end_tokens(tmp_path: Path, eos: int | list[int]) -> None:
    path = write_checkpoint(tmp_path, eos_token_id=5)
    edit_json(path / "generation_config.json", eos_token_id=eos)
    assert load_model(ModelOptions(str(path))).eos_token_ids == ({2, 7} if isinstance(eos, list) else {2})
    (path / "generation_config.json").unlink()
    assert load_model(ModelOptions(str(path))).eos_token_ids == {2, 5}


@pytest.mark.parametrize(("eos", "listed"), [(5, "5"), ([9, 5], "5, 9"), (None, "none")])
def test_the_tokenizers_end_token_ends_a_sequence_too(tmp_path: Path, eos: int | list[int] | None, listed: str) -> None:
    tiny_tokenizer().save_pretrained(write_checkpoint(tmp_path, eos_token_id=eos))
    loaded = load_model(ModelOptions(str(tmp_path)))
    assert loaded.eos_token_ids == {2, *([eos] if isinstance(eos, int) else eos or [])}
    assert loaded.notes == (
        f"eos_token_id ({listed}) lacks the tokenizer's end token `<eos>` (2), which ends a sequence all the same",
    )


def test_an_end_token_that_the_model_cannot_generate_ends_nothing(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, eos_token_id=5)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"pad_token": "<x>"})
    tokenizer.add_tokens([f"<{number}>" for number in range(VOCAB_SIZE - len(tokenizer))])
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(path)
    loaded = load_model(ModelOptions(str(path)))
    (note,) = loaded.notes
    assert loaded.eos_token_ids == {5} and f"`<end>` ({VOCAB_SIZE})" in note and "refused" in note


def test_tokens_that_the_model_lacks_are_noted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", eos_token_id=2)
    assert load_model(ModelOptions(str(tmp_path))).notes == ()
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": f"<extra-{token_id}>", **added}
        for token_id in range(len(tiny_tokenizer()), VOCAB_SIZE + 6)
    ]
    edit_json(tmp_path / "tokenizer.json", added_tokens=tokenizer["added_tokens"])
    edit_json(tmp_path / "config.json", pad_token_id=VOCAB_SIZE, eos_token_id=[2, VOCAB_SIZE + 1, -1])
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    loaded = load_model(ModelOptions(str(tmp_path)))
    of_tokenizer, of_eos = loaded.notes
    assert f"the model has {VOCAB_SIZE} tokens" in of_tokenizer
    assert f"`<extra-{VOCAB_SIZE + 4}>` ({VOCAB_SIZE + 4}) and 1 more" in of_tokenizer
    assert f"-1, {VOCAB_SIZE + 1}" in of_eos and loaded.eos_token_ids == {2}


def test_directory_without_tokenizer_has_none(tmp_path: Path) -> None:
    loaded = load_model(ModelOptions(str(write_checkpoint(tmp_path, with_tokenizer=False))))
    assert loaded.tokenizer is None and loaded.eos_token_ids == frozenset()


@pytest.mark.parametrize("model_type", REFUSED)
def test_architecture_that_cannot_be_served_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    path = write_refused_checkpoint(tmp_path, model_type)
    with pytest.raises(UnsupportedModel, match=REFUSED[model_type][1]) as caught:
        load_model(ModelOptions(str(path), max_model_len=128))
    assert repr(model_type) in str(caught.value)


class _MixesPositions(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return self.inner(hidden_states + 0.01 * hidden_states.roll(1, dims=1), **kwargs)


def test_positions_that_mix_outside_attention_are_refused() -> None:
    model = random_model("llama")
    model.model.layers[1].mlp = _MixesPositions(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="outside attention"):
        probe_attention(model, AttentionPort(model))


def test_attention_in_both_directions_is_refused() -> None:
    model = random_model("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UnsupportedModel, match="is_causal=False"):
        probe_attention(model, AttentionPort(model))


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss-window", "gemma3_text-window"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_probe_accepts_rounding_in_half_precision(tmp_path: Path, architecture: str, dtype: str) -> None:
    loaded = load_model(ModelOptions(str(write_checkpoint(tmp_path, architecture)), dtype=dtype))
    assert len(loaded.layers) == ARCHITECTURES[architecture]["num_hidden_layers"]


def test_max_model_len_is_the_configs_or_the_asked(llama: Path) -> None:
    assert load_model(ModelOptions(str(llama), max_model_len=100)).max_model_len == 100
    for asked, message in ((513, r"513.* 512"), (1, "max_model_len is 1")):
        with pytest.raises(ModelLoadError, match=message):
            load_model(ModelOptions(str(llama), max_model_len=asked))


def test_dynamic_position_encoding_keeps_to_its_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256}
    path = write_checkpoint(tmp_path)
    edit_json(path / "config.json", rope_parameters=rope)
    assert load_model(ModelOptions(str(path))).max_model_len == 256
    with pytest.raises(ModelLoadError, match=r"300.* 256"):
        load_model(ModelOptions(str(path), max_model_len=300))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere.*no such directory"):
        load_model(ModelOptions(str(tmp_path / "nowhere")))
    with pytest.raises(ModelLoadError, match="config"):
        load_model(ModelOptions(str(tmp_path)))


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors.*safetensors only"):
        load_model(ModelOptions(str(path)))


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    ran = tmp_path / "ran"
    (path / "custom.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    auto_map = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    edit_json(path / "config.json", auto_map=auto_map)
    load_model(ModelOptions(str(path)))  # transformers' own code for a type that it knows
    edit_json(path / "config.json", model_type="custom")
    with pytest.raises(ModelLoadError, match="config of model"):
        load_model(ModelOptions(str(path)))
    assert not ran.exists()


def test_broken_tokenizer_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, with_tokenizer=False)
    (path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="tokenizer of model"):
        load_model(ModelOptions(str(path)))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512_bf16", torch.bfloat16),
        ("fpu amx_bf16 amx_tile", torch.bfloat16),
        ("fpu avx2 avx512f", torch.float32),
    ],
)
def test_auto_dtype_is_bfloat16_where_the_cpu_has_it(tmp_path: Path, flags: str, expected: torch.dtype) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\nmodel name\t: x\nflags\t\t: {flags}\n")
    assert choose_dtype("auto", CPU, cpu_info) is expected
    assert choose_dtype("auto", CPU, tmp_path / "absent") is torch.float32
    assert choose_dtype("float16", CPU, cpu_info) is torch.float16


def test_unknown_dtype_and_device_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match="'int8'"):
        choose_dtype("int8", CPU)
    with pytest.raises(ModelLoadError, match="'tpu'"):
        choose_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(ModelLoadError, match="no CUDA device"):
        choose_device("cuda")


def test_two_models_in_one_process_do_not_disturb_each_other(tmp_path: Path, llama: Path) -> None:
    first = load_model(ModelOptions(str(llama), dtype="float32"))
    second = load_model(ModelOptions(str(write_checkpoint(tmp_path, "qwen3")), dtype="float32"))
    assert AutoModelForCausalLM.from_pretrained(llama).config._attn_implementation != ATTENTION_NAME
    assert first.port is not second.port
    limits = EngineLimits(max_num_batched_tokens=64)
    for loaded in (first, second, first):
        warm_up(build_runner(loaded, limits, RunnerOptions(kv_cache_bytes=2**20)), limits)


def test_memory_is_measured_with_the_scratch_block_alone(llama: Path) -> None:
    loaded = load_model(ModelOptions(str(llama), dtype="float32"))
    runner = TorchModelRunner(loaded, KVCache(loaded.layers, 0, 16, loaded.dtype, loaded.device))
    batches = dummy_batches(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=loaded.max_model_len, block_size=16
    )
    assert [batch.num_tokens for batch in batches] == [64, 64, 1 + 3 * 16, 4, 4]
    assert {batches[index].items[0].end for index in (0, 2, 3, 4)} == {loaded.max_model_len}
    for batch in batches:
        assert all(result.token_id is not None for result in runner.execute(batch))


def test_memory_is_measured_with_as_many_long_prompts_as_a_step_holds() -> None:
    def longest(max_num_seqs: int) -> list[tuple[int, int]]:
        batch = dummy_batches(max_num_seqs, max_num_batched_tokens=700, max_model_len=300, block_size=16)[0]
        return [(item.start, item.end) for item in batch.items]

    assert longest(4) == [(0, 300), (0, 300), (200, 300)]
    assert longest(2) == [(0, 300), (0, 300)]


def test_cache_takes_the_bytes_it_was_given(llama: Path) -> None:
    loaded = load_model(ModelOptions(str(llama), dtype="float32"))
    # 3 layers x 16 slots x 2 KV heads x (16 + 16) x 4 bytes
    block_bytes = bytes_per_block(loaded.layers, 16, torch.float32)
    assert block_bytes == 12_288
    runner = build_runner(loaded, EngineLimits(), RunnerOptions(kv_cache_bytes=10 * block_bytes + 5))
    assert (runner.num_blocks, runner.block_size, runner.max_model_len) == (9, 16, 512)
    with pytest.raises(ModelLoadError, match=f"kv_cache_bytes is 20000.* {2 * block_bytes}"):
        build_runner(loaded, EngineLimits(), RunnerOptions(kv_cache_bytes=20_000))


def test_batch_invariance_changes_nothing_on_a_cpu_and_says_so(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loaded = load_model(ModelOptions(str(llama), dtype="float32", batch_invariant=True, kernel_cache_dir=None))
    assert not loaded.is_batch_invariant and not loaded.attention_spec(16).is_batch_invariant
    assert "batch_invariant changes nothing on a CPU" in caplog.text


def test_batch_invariance_in_bfloat16_on_a_cpu_needs_the_kernels(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match="needs the compiled kernels"):
        load_model(ModelOptions(str(llama), dtype="bfloat16", batch_invariant=True, kernel_cache_dir=None))


@pytest.mark.parametrize(
    ("architecture", "sizes", "words"),
    [
        ("llama", {}, None),
        ("llama", {"head_dim": 24}, "do not support the sizes of the model's heads"),
        ("llama", {"intermediate_size": 72}, "uses torch's "),
        ("qwen3_moe", {}, "uses torch's "),
    ],
)
def test_batch_invariance_in_bfloat16_on_a_cpu_needs_kernels_for_the_whole_model(
    tmp_path: Path, architecture: str, sizes: dict[str, int], words: str | None
) -> None:
    need_kernels()
    path = write_checkpoint(tmp_path, architecture, with_tokenizer=False, **sizes)
    options = ModelOptions(str(path), dtype="bfloat16", device="cpu", batch_invariant=True)
    with nullcontext() if words is None else pytest.raises(ModelLoadError, match=words):
        assert not load_model(options).is_batch_invariant


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_loaded_model_maps_no_file_of_its_checkpoint(architecture: str, dtype: str, tmp_path: Path) -> None:
    """A view of one norm's numbers kept all weights in memory twice: mapped, and in huge pages."""
    checkpoint = write_checkpoint(tmp_path, architecture)
    for file in checkpoint.glob("*.safetensors"):  # in the model's dtype, or each weight is converted into a copy
        save_file({name: t.to(choose_dtype(dtype, CPU)) for name, t in load_file(file).items()}, file)
    loaded = load_model(ModelOptions(str(checkpoint), dtype=dtype, num_threads=1))
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert loaded.vocab_size and not [name for name in mapped if name.startswith(str(checkpoint))]
