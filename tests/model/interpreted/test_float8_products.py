"""Products of 8-bit floats, weights and inputs rounded: the numbers of the kernel, and the tokens of a CPU."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from replicas.errors import ModelLoadError
from replicas.model.layers import float8_linear
from replicas.model.layers.float8_linear import Float8Linear, check_float8, round_rows
from replicas.model.layers.ops import Norm
from replicas.model.layers.triton_ops import TritonLayerOps, check_layer_ops
from replicas.model.layers.triton_panels import TritonPanels
from replicas.model.loading import loader
from replicas.model.loading.config import read_config
from replicas.model.loading.options import ModelOptions
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import build_engine, load, random_prompts, requests_for, run
from tests.model.interpreted.test_panels import CPU, DTYPES, drawn, load_in_panels

pytestmark = [pytest.mark.usefixtures("bfloat16"), pytest.mark.rotated]


def codes(numbers: Tensor) -> Tensor:
    return numbers.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 208, 1056])
def test_rows_are_rounded_as_by_the_definition(dtype: torch.dtype, size: int) -> None:
    rows = drawn(7, size, dtype=dtype) * torch.tensor([1e-3, 1, 30, 1, 1, 1, 1])[:, None].to(dtype)
    rows[3], rows[4, 5], rows[5, 1], rows[6, 2] = 0, 6e4, torch.inf, torch.nan
    numbers, scales = TritonPanels(CPU).round_rows(rows)
    expected, expected_scales = round_rows(rows)
    assert torch.equal(codes(numbers[:5]), codes(expected[:5]))
    torch.testing.assert_close(scales[:5], expected_scales[:5], rtol=1e-6, atol=0)
    assert not scales[5:].isfinite().any() and scales[:5].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 208, 1056])
def test_a_norm_rounds_rows_as_the_rounding_behind_it(dtype: torch.dtype, size: int) -> None:
    ops, norm = TritonLayerOps(), Norm(drawn(size, dtype=dtype), 1e-5)
    rows = drawn(6, size, seed=3, dtype=dtype)
    rows[3], rows[4, 5], rows[5, 1] = 0, torch.inf, torch.nan
    for update in (None, drawn(6, size, seed=4, dtype=dtype)):
        sums, expected_sums = rows.clone(), rows.clone()
        numbers, scales = ops.add_normalize_and_round(sums, update, norm)
        normalized = ops.add_and_normalize(expected_sums, update, norm)
        expected, expected_scales = TritonPanels(CPU).round_rows(normalized)
        assert torch.equal(sums[:4], expected_sums[:4])
        assert torch.equal(codes(numbers[:4]), codes(expected[:4])) and torch.equal(scales[:4], expected_scales[:4])
        assert not scales[4:].isfinite().any() and scales[:4].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_products_are_those_of_the_rounded_numbers(dtype: torch.dtype) -> None:
    weight, bias, rows = drawn(48, 208, dtype=dtype), drawn(48, seed=2, dtype=dtype), drawn(3, 5, 208, dtype=dtype)
    layer = Float8Linear(weight, bias, TritonPanels(CPU).round_rows)
    numbers, scales = round_rows(rows)
    dense = layer.numbers.double() * layer.scales.double().t()
    expected = numbers.double() * scales.double()[..., None] @ dense.t() + bias.double()
    found = layer(rows)
    assert found.dtype == dtype and found.shape == (3, 5, 48)
    error = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error < {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]).all()
    assert 0.01 < float((dense - weight.double()).norm() / weight.double().norm()) < 0.05, "the weight is rounded, too"


def test_a_fault_of_the_rounding_is_found() -> None:
    assert check_float8(TritonPanels(CPU).round_rows, torch.float32, CPU) is None

    def wrong(rows: Tensor) -> tuple[Tensor, Tensor]:
        numbers, scales = round_rows(rows)
        return numbers, scales * 1.01

    assert "a product of rounded rows" in str(check_float8(wrong, torch.float32, CPU))


def test_a_fault_of_a_rounding_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TritonLayerOps.add_normalize_and_round

    def wrong(*arguments: Any) -> tuple[Tensor, Tensor]:
        numbers, scales = right(*arguments)
        return numbers, scales * 1.01

    monkeypatch.setattr(TritonLayerOps, "add_normalize_and_round", wrong)
    assert "add_normalize_and_round" in str(check_layer_ops(torch.float32, CPU))


def test_a_version_of_torch_whose_products_hang_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("the products were tried")

    monkeypatch.setattr(float8_linear, "compute_capability", lambda _: 89)
    for version, words in (("2.11.0", "8.9 torch 2.11.0 hangs"), ("2.12.0", "the products were tried")):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        assert words in str(check_float8(fails, torch.float32, CPU))


def test_the_tokens_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    path, right, sizes = cached_checkpoint("llama"), TritonPanels.round_rows, []

    def noted(self: TritonPanels, rows: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(rows.shape[1])
        return right(self, rows)

    monkeypatch.setattr(TritonPanels, "round_rows", noted)
    on_gpu = load_in_panels(path, TritonPanels(CPU), "fp8_w8a8", TritonLayerOps())
    on_cpu, exact = load(path, quantization="fp8_w8a8"), load(path)
    for loaded in (on_gpu, on_cpu):
        kinds = {type(module) for module in loaded.model.modules() if isinstance(module, (Float8Linear, nn.Linear))}
        assert kinds == {Float8Linear}
    requests = requests_for(random_prompts((5, 20)), SamplingParams(max_tokens=6, temperature=0.0))
    found, expected, other = (
        [output.token_ids for output in run(build_engine(loaded), requests)] for loaded in (on_gpu, on_cpu, exact)
    )
    assert found == expected != other
    config = on_gpu.model.config
    num_passes = sizes.count(config.intermediate_size) // config.num_hidden_layers
    # Beside the output layer, two of a layer's four have no norm in front that rounds.
    assert len(sizes) == num_passes * (2 * config.num_hidden_layers + 1) > 0


def test_a_gpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(str(cached_checkpoint("llama")))
    monkeypatch.setattr(loader, "panel_products", lambda *_, **__: TritonPanels(CPU))

    options = ModelOptions("x", quantization="fp8_w8a8")
    gpu = torch.device("cuda")
    monkeypatch.setattr(loader, "check_float8", lambda *_: None)
    assert isinstance(loader.choose_products(config, options, torch.float32, gpu), TritonPanels)
    monkeypatch.setattr(loader, "check_float8", lambda *_: "RuntimeError: capability 8.0")
    with pytest.raises(ModelLoadError, match="products do not work on cuda: RuntimeError: capability"):
        loader.choose_products(config, options, torch.float32, gpu)
