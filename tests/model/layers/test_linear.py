"""Linear layers: packed and compiled ones against float64, those of 8-bit weights against what these stand for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from replicas.errors import ModelLoadError
from replicas.model.checkpoint.quantized_linear import IQ4_VALUES, QuantizedLinear
from replicas.model.layers.linear import (
    CppLinear,
    GroupedLinear,
    Int8Linear,
    PackedLinear,
    can_multiply,
    can_pack,
    choose_linears,
    join_linears,
    pack,
    pack_groups,
    plain_linear,
    replace_linears,
    rounded_to_int4,
    unpack,
)
from replicas.model.layers.rounding import quantize_fp8, quantize_int4

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PACKED_DTYPES = [dtype for dtype in TOLERANCES if can_pack(dtype)]
PACKED_SHAPES = [(64, 64), (192, 48), (33, 70), (1, 576)]
# The last is more panels than three threads take one by one.
SHAPES = [(4, 32), (64, 64), (192, 96), (41, 576), (1732, 64)]
compiled = pytest.mark.usefixtures("kernels_in_threads")


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)


def weight_and_bias(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return numbers(*shape, dtype=dtype), numbers(shape[0], dtype=dtype, seed=1) if has_bias else None


def check_product(layer: nn.Module, inputs: Tensor, weight: Tensor, bias: Tensor | None, tolerance: float) -> None:
    """Compare the layer's outputs with the product by definition, in float64."""
    exact = functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(layer(inputs).double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("shape", PACKED_SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_equals_the_product_by_definition(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = weight_and_bias(shape, has_bias, dtype)
    layer = PackedLinear(weight, bias)
    for num_rows in (0, 1, 3, 33, 200):
        check_product(layer, numbers(1, num_rows, shape[1], dtype=dtype, seed=2), weight, bias, TOLERANCES[dtype])


@pytest.mark.sampled(12)
@compiled
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_compiled_equals_the_product_by_definition(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = weight_and_bias(shape, has_bias, dtype)
    layer = CppLinear(weight, bias)
    for num_rows in (0, 1, 2, 3, 4, 5, 7, 13, 16, 23, 32, 33, 96, 97, 700, 1100):
        check_product(layer, numbers(1, num_rows, shape[1], dtype=dtype, seed=2), weight, bias, TOLERANCES[dtype])


@pytest.mark.sampled(12)
@compiled
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_equals_the_product_of_the_dequantized_weights(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    weight, bias = weight_and_bias(shape, has_bias, dtype)
    layer = Int8Linear(weight, bias)
    restored = layer.numbers.double() * layer.scales.double()[:, None]
    assert ((restored - weight.double()).abs() <= 0.501 * layer.scales[:, None]).all()
    for num_rows in (0, 1, 4, 33, 600):
        inputs = numbers(num_rows, shape[1], dtype=dtype, seed=2)
        check_product(layer, inputs, restored, bias, max(TOLERANCES[dtype], 1e-3))


def grouped_weight(shape: tuple[int, int], group: int, *, bits: int = 4, has_zero_points: bool) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(0)
    scales = numbers(shape[0], shape[1] // group, dtype=torch.float16) / 2 ** (bits - 1)
    middle = 2 ** (bits - 1)
    return QuantizedLinear(
        torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=generator),
        scales,
        torch.randint(0, 2**bits, scales.shape, generator=generator)
        if has_zero_points
        else torch.full(scales.shape, middle),
        bits,
        inputs_per_scale=group,
    )


def table_weight(shape: tuple[int, int], group: int) -> QuantizedLinear:
    weight = grouped_weight(shape, group, has_zero_points=False)
    return replace(weight, zero_points=None, scales=weight.scales / 16, table=torch.tensor(IQ4_VALUES).float())


@pytest.mark.sampled(16)
@compiled
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("shape", "group"), [((4, 32), 32), ((192, 96), 4), ((41, 576), 16), ((1732, 64), 64)])
@pytest.mark.parametrize(("bits", "has_zero_points"), [(4, False), (4, True), (8, False), (8, True)])
def test_grouped_equals_the_product_of_the_dequantized_weights(
    shape: tuple[int, int], group: int, bits: int, has_zero_points: bool, dtype: torch.dtype
) -> None:
    weight = grouped_weight(shape, group, bits=bits, has_zero_points=has_zero_points)
    bias = numbers(shape[0], dtype=dtype, seed=1) if has_zero_points else None
    layer = GroupedLinear(pack_groups(weight), bias, dtype)
    torch.testing.assert_close(layer.weight, weight.dense(dtype))
    for num_rows in (0, 1, 2, 4, 13, 33, 600):
        inputs = numbers(num_rows, shape[1], dtype=dtype, seed=2)
        check_product(layer, inputs, weight.dense(torch.float32), bias, TOLERANCES[dtype])


@pytest.mark.sampled(4)
@compiled
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("shape", "group"), [((4, 32), 32), ((41, 576), 16), ((192, 64), 64)])
def test_numbers_that_stand_for_other_values_keep_4_bits(
    shape: tuple[int, int], group: int, dtype: torch.dtype
) -> None:
    weight, other = table_weight(shape, group), grouped_weight(shape, group, has_zero_points=True)
    layer = GroupedLinear(pack_groups(weight), None, dtype)
    assert layer.bits == 4 and layer.packed.nbytes == (-shape[0] % 32 + shape[0]) * shape[1] // 2
    torch.testing.assert_close(layer.weight, weight.dense(dtype))
    for num_rows in (0, 1, 2, 4, 13, 33, 600):
        inputs = numbers(num_rows, shape[1], dtype=dtype, seed=2)
        check_product(layer, inputs, weight.dense(torch.float32), None, TOLERANCES[dtype])
    if layer.can_join(layer):
        assert layer.join([layer]).bits == 4
        mixed = layer.join([GroupedLinear(pack_groups(other), None, dtype)])
        assert mixed.bits == 8
        torch.testing.assert_close(mixed.weight, torch.cat([weight.dense(dtype), other.dense(dtype)]))


@compiled
def test_signed_numbers_without_zero_points_are_kept() -> None:
    weight = QuantizedLinear(torch.arange(-128, 128, dtype=torch.int8).view(4, 64), torch.ones(4, 2), None, 8, 1, 32)
    layer = GroupedLinear(pack_groups(weight), None, torch.bfloat16)
    assert len(layer.scales) == 1 and torch.equal(layer.weight, weight.dense(torch.bfloat16))
    assert torch.equal(layer(torch.eye(64, dtype=torch.bfloat16)), weight.dense(torch.bfloat16).t())


@pytest.mark.sampled(4)
@compiled
@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 48), (4, 8)])
def test_joined_grouped_layers_give_their_outputs_side_by_side(bits: int, group: int, has_zero_points: bool) -> None:
    weights = [
        grouped_weight((64, 96), 32, has_zero_points=True),
        grouped_weight((64, 96), group, bits=bits, has_zero_points=has_zero_points),
    ]
    parts = [GroupedLinear(pack_groups(weight), None, torch.float32) for weight in weights]
    inputs = numbers(5, 96, dtype=torch.float32)
    joined = join_linears(parts, plain_linear)
    assert isinstance(joined, GroupedLinear) and joined.bits == bits
    torch.testing.assert_close(joined(inputs), torch.cat([part(inputs) for part in parts], dim=1))
    dense = join_linears([parts[0], plain_linear(weights[1].dense(torch.float32), None)], plain_linear)  # type: ignore[list-item]
    torch.testing.assert_close(dense(inputs), joined(inputs), atol=1e-4, rtol=1e-4)


def test_rounding_to_int4_is_to_the_nearest() -> None:
    weight = numbers(40, 64, dtype=torch.bfloat16)
    weight[3] = 0
    rounded = quantize_int4(weight)
    scales = rounded.scales.abs().repeat_interleave(32, dim=1)
    error = (rounded.dense(torch.float32) - weight.float()).abs()
    assert (error <= scales * torch.where(rounded.numbers == 15, 1.001, 0.501)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_fp8_is_to_the_nearest(dtype: torch.dtype) -> None:
    weight = numbers(40, 64, dtype=dtype)
    weight[3], weight[5, 7] = 0, 1e4
    rounded = quantize_fp8(weight)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    nearest = (weight.float()[..., None] / rounded.scales[..., None] - codes[codes.isfinite()]).abs().amin(-1)
    error = (rounded.dense(torch.float32) - weight.float()).abs() / rounded.scales
    torch.testing.assert_close(error, nearest, rtol=1e-5, atol=1e-4)
    assert rounded.numbers.float().abs().amax(1).tolist() == [0.0 if row == 3 else 448.0 for row in range(40)]


def test_fp8_on_a_cpu_has_the_rounded_values_and_needs_no_kernels() -> None:
    weight, inputs = numbers(40, 64, dtype=torch.float32), numbers(5, 64, dtype=torch.float32, seed=1)
    layer = choose_linears(torch.float32, False, "fp8")(weight, None)
    torch.testing.assert_close(layer(inputs), inputs @ quantize_fp8(weight).dense(torch.float32).t())
    assert not torch.equal(layer.weight, weight)


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_a_packed_weight_can_be_read(dtype: torch.dtype) -> None:
    weight = numbers(33, 70, dtype=dtype)
    assert torch.equal(PackedLinear(weight, None).weight, weight)


def test_a_format_that_cannot_be_packed_is_left_plain() -> None:
    assert not can_pack(torch.float16)
    assert choose_linears(torch.float16, False, "none") is plain_linear


def test_joined_layers_give_their_outputs_side_by_side() -> None:
    parts = [nn.Linear(12, size) for size in (5, 7, 2)]
    inputs = torch.randn(3, 12)
    joined = join_linears(parts, plain_linear)
    torch.testing.assert_close(joined(inputs), torch.cat([part(inputs) for part in parts], dim=1))


def in_8_bits(weight: Tensor, _: None) -> GroupedLinear:
    kept = grouped_weight((weight.shape[0], weight.shape[1]), 16, bits=8, has_zero_points=True)
    return GroupedLinear(pack_groups(kept), None, weight.dtype)


@pytest.mark.sampled(8)
@compiled
@pytest.mark.parametrize("kind", [CppLinear, Int8Linear, rounded_to_int4, in_8_bits])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rows_are_independent(kind: type[nn.Module], dtype: torch.dtype) -> None:
    layer = kind(numbers(1024, 896, dtype=dtype), None)  # Of many sums some change with the order of additions.
    inputs = numbers(60, 896, dtype=dtype, seed=1)
    outputs = layer(inputs)
    for first, last in ((7, 8), (10, 12), (13, 16), (16, 20), (20, 53)):
        assert torch.equal(layer(inputs[first:last]), outputs[first:last])
    inputs[3] = torch.nan
    inputs[4, 5] = torch.inf
    poisoned = layer(inputs)
    assert not poisoned[3:5].isfinite().any()
    assert torch.equal(poisoned[5:], outputs[5:]) and torch.equal(poisoned[:3], outputs[:3])


@compiled
def test_int8_of_an_empty_row_is_zero() -> None:
    layer = Int8Linear(torch.zeros(8, 32), torch.ones(8))
    assert torch.equal(layer(torch.randn(2, 32)), torch.ones(2, 8))


@pytest.mark.parametrize("kind", [PackedLinear, CppLinear])
def test_a_tied_head_is_replaced_and_the_embedding_stays(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(24, 32), "inner": nn.Linear(32, 32), "head": nn.Linear(32, 24)})
    embedding = model["head"].weight = model["embedding"].weight
    replace_linears(model, choose_linears(torch.float32, True, "none") if kind is CppLinear else kind)
    assert [type(module) for module in model.values()] == [nn.Embedding, kind, kind]
    assert model["embedding"].weight is embedding and torch.equal(model["head"].weight, embedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(4, 32), (32, 64), (33, 96), (64, 32)])
def test_packed_weights_can_be_unpacked(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (numbers(*shape, dtype=torch.float32) * 100).to(dtype)
    packed = pack(weight)
    assert packed.is_contiguous() and packed.numel() == -(-shape[0] // 32) * 32 * shape[1]
    assert torch.equal(unpack(packed, shape[0]), weight)


@compiled
def test_int8_sums_of_many_inputs_do_not_overflow() -> None:
    layer = Int8Linear(torch.ones(3, 8192), None)
    inputs = torch.ones(5, 8192)
    torch.testing.assert_close(layer(inputs), torch.full((5, 3), 8192.0), rtol=1e-3, atol=0)


@compiled
def test_shapes_that_the_kernels_do_not_take_are_left_to_others() -> None:
    assert can_multiply((22, 64)) and not can_multiply((24, 80))
    model = nn.ModuleDict({"odd": nn.Linear(22, 22), "even": nn.Linear(32, 32)})
    replace_linears(model, choose_linears(torch.float32, True, "int8"))
    assert isinstance(model["even"], Int8Linear) and not isinstance(model["odd"], Int8Linear)


def test_int8_without_kernels_and_unknown_kinds_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="int8"):
        choose_linears(torch.float32, False, "int8")
    with pytest.raises(ModelLoadError, match="int2"):
        choose_linears(torch.float32, True, "int2")
