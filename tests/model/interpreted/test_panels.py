"""Weights in panels: they have the values of the checkpoint, bit for bit, and products differ in their order alone."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.probe import probe_attention
from replicas.model.checkpoint.quantized_linear import FP4_VALUES, IQ4_VALUES, QuantizedLinear
from replicas.model.diagnosis import part_of
from replicas.model.layers import triton_panels
from replicas.model.layers.experts import FusedExperts
from replicas.model.layers.kept_experts import round_experts
from replicas.model.layers.linear import choose_panels, join_linears, kept_panels, plain_linear
from replicas.model.layers.ops import LayerOps, TorchLayerOps
from replicas.model.layers.optimize import FusedModules, optimize_model, panel_products
from replicas.model.layers.panels import PanelLinear, ParallelLinears, compile_panels, pack_panels, panel_linear
from replicas.model.layers.rounding import ROUNDINGS
from replicas.model.layers.triton_panels import TritonPanels, divide_panels
from replicas.model.loading import loader
from replicas.model.loading.config import read_config
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.memory import weights_on_gpu
from replicas.model.loading.options import ROUNDS_AGAIN, ModelOptions
from replicas.model.loading.weights import load_weights
from replicas.model.parallel.shares import ModelCuts, Share
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import build_engine, check_equals_generate, load, random_prompts, requests_for, run
from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint
from testkit.model.tiny_checkpoints import write_checkpoint
from tests.model.loading.test_gguf_bits import KINDS as KINDS_OF_GGUF
from tests.model.loading.test_gguf_bits import converted

pytestmark = [pytest.mark.usefixtures("bfloat16"), pytest.mark.rotated]
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_code(kind: str, num_outputs: int, num_inputs: int) -> Tensor:
    """Return numbers of a kind, of which each code is among them if there is room."""
    codes = torch.randperm(num_outputs * num_inputs, generator=torch.Generator().manual_seed(1))
    codes = codes.view(num_outputs, num_inputs)
    if kind in ("int4", "table", "fp4"):
        return (codes % 16).to(torch.uint8)
    codes = (codes % 256).to(torch.uint8)
    if kind == "fp8":
        return codes.masked_fill((codes & 0x7F) == 0x7F, 0).view(torch.float8_e4m3fn)
    return codes.view(torch.int8) if kind == "int8" else codes


def weight_of(
    kind: str, shape: tuple[int, int], group: int, *, scale_type: torch.dtype = torch.float32
) -> QuantizedLinear:
    """Return a weight; `int4` and `uint8` have zero points, and `minima` has some between the integers."""
    num_groups = -(-shape[1] // group)
    scales = (drawn(shape[0], num_groups).abs() / 100 + 0.001).to(scale_type)
    numbers = every_code("int4" if kind in ("minima", "symmetric") else kind, *shape)
    zero_points = {
        "int4": numbers[:, :num_groups],
        "uint8": numbers[:, :num_groups],
        "minima": drawn(shape[0], num_groups, seed=3) * 8,
        "symmetric": torch.full_like(numbers[:, :num_groups], 8),
    }.get(kind)
    tables = {"table": IQ4_VALUES, "fp4": FP4_VALUES}
    table = torch.tensor(tables[kind]).float() if kind in tables else None
    bits = 8 if kind in ("int8", "uint8", "fp8") else 4
    return QuantizedLinear(numbers, scales, zero_points, bits, inputs_per_scale=min(group, shape[1]), table=table)


KINDS = ("symmetric", "int4", "minima", "table", "fp4", "int8", "uint8", "fp8")
# Outputs and inputs, and inputs of a scale: panels and units that are not full, and every size of a unit.
SHAPES = [((70, 208), 16), ((64, 96), 32), ((70, 208), 64), ((70, 400), 128), ((40, 144), 10**6)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "group"), SHAPES)
def test_widened_weights_have_the_bits_of_the_checkpoints(kind: str, shape: tuple[int, int], group: int) -> None:
    weight = weight_of(kind, shape, group, scale_type=torch.float16)
    panels, products = pack_panels(weight), TritonPanels(CPU)
    assert len(weight.numbers.view(torch.uint8).unique()) == (254 if kind == "fp8" else 2**weight.bits)
    assert panels.numbers.nbytes >= weight.numbers.numel() * weight.bits // 8
    for dtype in DTYPES:
        assert torch.equal(products.widen(panels, dtype), weight.dense(dtype))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_widened_exactly_in_registers(kind: str) -> None:
    """The product with one input of 1 is the weight of that input."""
    weight = weight_of(kind, (70, 128), 32)
    layer = panel_linear(TritonPanels(CPU), weight, None, torch.float32)
    columns = torch.eye(128)[::3].contiguous()
    found, expected = layer(columns), weight.dense(torch.float32).t()[::3]
    if kind == "minima":
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found, expected)


CASES = [(kind, group) for kind in KINDS for group in (16, 32, 64, 128, 10**6)]
QUICK = [*((kind, 32) for kind in KINDS), ("int4", 128), ("symmetric", 64), ("minima", 16), ("uint8", 10**6)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "group"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.deep) for case in CASES]
)
def test_products_are_those_of_the_definition(kind: str, group: int) -> None:
    """With large groups the sums are cut into parts."""
    dtype, num_inputs = DTYPES[KINDS.index(kind) % 2], 208 if group < 128 else 1056
    weight, bias = weight_of(kind, (72, num_inputs), group), drawn(72, seed=5, dtype=dtype)
    layer = panel_linear(TritonPanels(CPU), weight, bias, dtype)
    dense = weight.dense(torch.float32).double()
    for num_rows in (0, 1, 17):
        rows = drawn(num_rows, num_inputs, seed=num_rows, dtype=dtype)
        found, expected = layer(rows), rows.double() @ dense.t() + bias.double()
        error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert found.dtype == dtype and (error < TOLERANCES[dtype]).all()


def test_a_number_that_is_nan_makes_its_output_nan() -> None:
    weight = weight_of("fp8", (70, 96), 32)
    weight.numbers.view(torch.uint8)[3, 40] = 0xFF
    layer = panel_linear(TritonPanels(CPU), weight, None, torch.float32)
    is_nan = layer(drawn(2, 96)).isnan()
    assert is_nan[:, 3].all() and int(is_nan.sum()) == 2


def test_scales_of_blocks_and_other_orders_of_inputs() -> None:
    shape = (80, 160)
    blocks = replace(weight_of("fp8", (2, 160), 32), numbers=every_code("fp8", *shape), outputs_per_scale=48)
    order = (torch.arange(160) // 32)[torch.randperm(160, generator=torch.Generator().manual_seed(1))]
    for weight in (blocks, replace(weight_of("int4", shape, 32), order=order)):
        layer = panel_linear(TritonPanels(CPU), weight, None, torch.float32)
        assert torch.equal(layer.weight, weight.dense(torch.float32))
        rows = drawn(1, 3, 160)
        torch.testing.assert_close(layer(rows), rows @ weight.dense(torch.float32).t())


def test_joined_layers_give_their_outputs_side_by_side() -> None:
    products, rows = TritonPanels(CPU), drawn(5, 96)
    weights = [weight_of(kind, (64, 96), 32) for kind in ("int4", "int4", "uint8")]
    layers = [panel_linear(products, weight, None, torch.float32) for weight in weights]
    plain = plain_linear(drawn(30, 96, seed=2), None)
    for parts, kind in ((layers[:2], PanelLinear), (layers, ParallelLinears), ([layers[0], plain], ParallelLinears)):
        joined = join_linears(parts, plain_linear)  # type: ignore[arg-type]
        assert type(joined) is kind
        torch.testing.assert_close(joined(rows), torch.cat([part(rows) for part in parts], dim=1))
    assert join_linears(layers[:1], plain_linear) is layers[0]


def test_a_large_weight_is_widened_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, rows = weight_of("int4", (200, 96), 32), drawn(200), drawn(300, 96)
    expected = panel_linear(TritonPanels(CPU), weight, bias, torch.float32)(rows)
    monkeypatch.setattr(triton_panels, "_SCRATCH_NUMBERS", 70 * 96)
    found = panel_linear(TritonPanels(CPU), weight, bias, torch.float32)(rows)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, rows @ weight.dense(torch.float32).t() + bias)


def test_batch_invariant_products_do_not_depend_on_the_rows() -> None:
    layer = panel_linear(TritonPanels(CPU, is_batch_invariant=True), weight_of("int4", (70, 1056), 32), None, DTYPES[1])
    rows = drawn(90, 1056, dtype=DTYPES[1])
    together = layer(rows)
    for first, last in ((0, 1), (7, 80), (89, 90)):
        assert torch.equal(layer(rows[first:last]), together[first:last])


def test_parts_cover_the_sums_and_keep_enough_of_them() -> None:
    for num_units, unit_inputs, out_size in (
        (32, 128, 4096),
        (112, 128, 4096),
        (32, 128, 28_672),
        (9, 64, 960),
        (256, 16, 4096),
    ):
        for num_rows in (1, 16, 17, 64, 65, 256):
            one = divide_panels(num_units, unit_inputs, out_size, num_rows, 2)
            assert one.num_parts * one.part_units >= num_units > (one.num_parts - 1) * one.part_units
            assert one.num_parts == 1 or one.part_units >= 4
            assert one.num_parts * num_rows * out_size * 4 <= 2**26


def test_a_fault_of_the_kernels_is_found(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert panel_products(torch.float32, CPU) is not None
    right = TritonPanels.widen
    monkeypatch.setattr(TritonPanels, "widen", lambda *arguments: right(*arguments) * 1.01)
    assert panel_products(torch.float32, CPU) is None
    assert "become dense" in caplog.text and "a widened weight of int4" in caplog.text
    monkeypatch.setattr("replicas.model.layers.triton_panels.check_panels", lambda *_: None)
    assert panel_products(torch.float32, CPU) is not None
    assert panel_products(torch.float32, CPU, lambda _: False) is None, "they do not work on another rank"


KEPT = {
    "compressed-tensors W4A16": "4-bit, kept in 4 bits",
    "compressed-tensors W4A16 asymmetric": "4-bit, kept in 4 bits",
    "compressed-tensors W4A16 ordered": "4-bit, kept in 4 bits",
    "compressed-tensors W8A16": "8-bit, kept in 8 bits",
    "compressed-tensors W8A8": "8-bit, kept in 8 bits; activations stay in float32, not 8-bit int",
    "compressed-tensors FP8 dynamic": "8-bit, kept in 8 bits; activations stay in float32, not 8-bit float",
    "compressed-tensors FP8 static": "8-bit, kept in 8 bits; activations stay in float32, not 8-bit float",
    "compressed-tensors FP8 blocks": "8-bit, kept in 8 bits; activations stay in float32, not 8-bit float",
    "AWQ": "4-bit, kept in 4 bits",
    "GPTQ": "4-bit, kept in 4 bits",
    "GPTQ desc_act": "4-bit, kept in 4 bits",
    "GPTQ v2": "4-bit, kept in 4 bits",
    "GPTQ 3 bits": "3-bit, dequantized to float32",
    "GPTQ 8 bits": "8-bit, kept in 8 bits",
    "FP8 of Llama": "8-bit, kept in 8 bits; activations stay in float32, not FP8",
    "FP8 per tensor": "8-bit, kept in 8 bits; activations stay in float32, not FP8",
    "FP8 of modelopt": "8-bit, kept in 8 bits; activations stay in float32, not FP8",
    "NVFP4 of modelopt": "4-bit, kept in 4 bits; activations stay in float32, not FP4",
    "compressed-tensors NVFP4": "4-bit, kept in 4 bits; activations stay in float32, not 4-bit float",
    "bitsandbytes int8": "8-bit, kept in 8 bits; activations stay in float32, not 8-bit int",
}
"""Formats, and the end of the words about what becomes of their weights on a GPU."""


def load_in_panels(
    path: Path, products: TritonPanels, quantization: str = "none", ops: LayerOps | None = None
) -> LoadedModel:
    """Load a checkpoint as on a GPU: weights in panels, but the other layers in plain torch if there are no `ops`."""
    kept = kept_panels(products, quantization, rounds_again=quantization in ROUNDS_AGAIN)
    weights = load_weights(str(path), read_config(str(path)), torch.float32, kept=kept)
    model = weights.model.eval()
    port = AttentionPort(model)
    layers = probe_attention(model, port)
    if quantization != "none":
        round_experts(model, ROUNDINGS[quantization], products, {})
    optimize_model(model, port, layers, FusedModules(ops or TorchLayerOps(), choose_panels(products, quantization)))
    return replace(load(path), model=model, port=port, layers=layers, weights=weights.description)


QUICK_FORMATS = (
    "AWQ",
    "GPTQ desc_act",
    "compressed-tensors FP8 blocks",
    "compressed-tensors W8A8",
    "NVFP4 of modelopt",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [name if name in QUICK_FORMATS else pytest.param(name, marks=pytest.mark.deep) for name in KEPT]
)
def test_kept_weights_give_the_tokens_of_the_dequantized_model(tmp_path: Path, name: str) -> None:
    method = METHODS[name]
    path = quantize_checkpoint(cached_checkpoint(method.architecture), tmp_path, method)
    loaded = load_in_panels(path, TritonPanels(CPU))
    assert loaded.weights.endswith(KEPT[name])
    num_kept = sum(isinstance(module, PanelLinear) for module in loaded.model.modules())
    # Keys and values have half a panel of outputs: they are not joined. Gate and up are.
    assert num_kept == (0 if "dequantized" in KEPT[name] else 18)
    check_equals_generate(build_engine(loaded), path.parent / "dense", random_prompts((5, 20)), max_tokens=3)


def taken_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["AWQ", "GPTQ desc_act", "compressed-tensors FP8 blocks", "bitsandbytes int8"])
def test_memory_is_that_of_the_prediction(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    path = quantize_checkpoint(write_checkpoint(tmp_path / "plain", **sizes), tmp_path, METHODS[name])
    weights = load_weights(str(path), read_config(str(path)), torch.float32, kept=kept_panels(TritonPanels(CPU)))
    found, dense = (weights_on_gpu(path, "float32", 4, keeps_bits=keeps_bits) for keeps_bits in (True, False))
    assert found.num_bytes == pytest.approx(taken_bytes(weights.model), rel=0.02)
    assert found.description == weights.description
    assert dense.num_bytes == 4 * dense.num_values > found.num_bytes and "dequantized" in dense.description


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["AWQ", "compressed-tensors FP8 blocks", "NVFP4 of modelopt"])
def test_memory_of_a_rank_is_that_of_the_prediction(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    path = quantize_checkpoint(write_checkpoint(tmp_path / "plain", **sizes), tmp_path, METHODS[name])
    config, kept = read_config(str(path)), kept_panels(TritonPanels(CPU))
    part = load_weights(str(path), config, torch.float32, kept=kept, cuts=ModelCuts(config, Share(1, 2)))
    found = part_of(str(path), torch.float32, 2, keeps_bits=True)
    assert found.num_bytes == pytest.approx(taken_bytes(part.model), rel=0.02)
    assert found.num_bytes <= 0.55 * weights_on_gpu(path, "float32", 4, keeps_bits=True).num_bytes
    assert found.description == part.description and "kept" in found.description


@pytest.mark.deep
@pytest.mark.parametrize("name", KINDS_OF_GGUF)
def test_gguf_weights_keep_their_bits_and_their_values(tmp_path: Path, name: str) -> None:
    kind, finer, words = KINDS_OF_GGUF[name]
    path = converted(tmp_path, kind, finer)
    loaded = load_in_panels(path, TritonPanels(CPU))
    assert loaded.weights == f"GGUF, {words}"
    found = weights_on_gpu(path, "float32", 4, keeps_bits=True)
    assert found.num_bytes == pytest.approx(taken_bytes(loaded.model), rel=0.02)
    save_file(load_weights(str(path), read_config(str(path)), torch.float32).model.state_dict(),
              tmp_path / "dense" / "model.safetensors", {"format": "pt"})  # fmt: skip
    check_equals_generate(build_engine(loaded), tmp_path / "dense", random_prompts((5,)), max_tokens=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_dense_weights_are_rounded_as_on_a_cpu(quantization: str) -> None:
    path = cached_checkpoint("llama")
    loaded = load_in_panels(path, TritonPanels(CPU), quantization)
    layers = [module for module in loaded.model.modules() if isinstance(module, PanelLinear)]
    # Keys and values have half a panel of outputs: they are not joined.
    assert len(layers) == 19 and {layer.panels.format.bits for layer in layers} == {4 if quantization == "int4" else 8}
    if quantization == "fp8":
        found = weights_on_gpu(path, "float32", 4, keeps_bits=True)
        padding = sum(layer.panels.numbers.nbytes - layer.out_features * layer.in_features for layer in layers)
        assert found.num_bytes_in_fp8 == pytest.approx(taken_bytes(loaded.model) - padding, rel=0.02)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_dense_weights_are_rounded_as_they_are_read(quantization: str) -> None:
    """A device never holds them all. The output layer may be the embedding: it is rounded later."""
    path = str(cached_checkpoint("llama"))
    kept = kept_panels(TritonPanels(CPU), quantization)
    model = load_weights(path, read_config(path), torch.float32, kept=kept).model
    assert [name for name, module in model.named_modules() if type(module) is nn.Linear] == ["lm_head"]
    dense = (
        load_weights(path, read_config(path), torch.float32).model.get_submodule("model.layers.1.mlp.up_proj").weight
    )
    expected = ROUNDINGS[quantization](dense).dense(torch.float32)
    assert torch.equal(model.get_submodule("model.layers.1.mlp.up_proj").weight, expected)


@pytest.mark.parametrize("architecture", ["qwen3_moe", pytest.param("gpt_oss-window", marks=pytest.mark.deep)])
def test_fp8_gives_the_tokens_of_a_cpu(architecture: str) -> None:
    """Its experts are rounded, too."""
    path = cached_checkpoint(architecture)
    on_cpu = load(path, quantization="fp8")
    on_gpu = load_in_panels(path, TritonPanels(CPU), "fp8")
    experts = [module for module in on_gpu.model.modules() if isinstance(module, FusedExperts)]
    assert len(experts) == 3 and all(len(module.kept) == 2 for module in experts)
    prompts = random_prompts((5, 9))
    requests = requests_for(prompts, SamplingParams(max_tokens=4, temperature=0.0))
    found, expected, exact = (run(build_engine(each), requests) for each in (on_gpu, on_cpu, load(path)))
    tokens = [[output.token_ids for output in outputs] for outputs in (found, expected, exact)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_every_kernel_of_a_layer_runs_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    products, seen = TritonPanels(CPU), []
    layers = [panel_linear(products, weight_of("int4", (64, 96), 32), None, torch.float32) for _ in range(2)]
    monkeypatch.setattr(TritonPanels, "multiply", lambda _, rows, panels, bias: seen.append(len(rows)) or rows[:, :64])
    compile_panels(nn.ModuleList(layers))
    assert seen == [1, 32, 64, 256, 257]
    ways = {(divide_panels(1, 64, 64, num_rows, 2).tile, num_rows > 256) for num_rows in range(1, 400)}
    assert len(ways) == len(seen)


def test_a_gpu_loads_what_its_options_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for weights of 4 and 8 bits follow from the options, the checkpoint and the check of the kernels."""
    gpu, products = torch.device("cuda"), TritonPanels(CPU)
    config = read_config(str(cached_checkpoint("llama")))
    plain = ModelOptions("x")
    monkeypatch.setattr(loader, "panel_products", lambda *_, **__: products)
    assert loader.choose_products(config, plain, torch.bfloat16, gpu) is None
    assert loader.choose_products(config, replace(plain, quantization="int4"), torch.bfloat16, CPU) is None
    assert loader.choose_products(config, replace(plain, quantization="int4"), torch.bfloat16, gpu) is products
    compiled = replace(plain, quantization="int4", compile_layers=True)
    with pytest.raises(ModelLoadError, match="compile_layers is true, which contradicts quantization"):
        loader.choose_products(config, compiled, torch.bfloat16, gpu)
    config.quantization_config = {"quant_method": "awq"}
    assert loader.choose_products(config, plain, torch.bfloat16, gpu) is products
    assert loader.choose_products(config, replace(plain, compile_layers=True), torch.bfloat16, gpu) is None
    monkeypatch.setattr(loader, "panel_products", lambda *_, **__: None)
    assert loader.choose_products(config, plain, torch.bfloat16, gpu) is None
    with pytest.raises(ModelLoadError, match="quantization is 'int8', whose kernels do not work on cuda"):
        loader.choose_products(config, replace(plain, quantization="int8"), torch.bfloat16, gpu)
