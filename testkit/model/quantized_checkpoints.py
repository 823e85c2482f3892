"""Quantized checkpoints in the formats that people publish, each beside a plain one with the same weights.

A writer quantizes each linear layer and also computes its weight from the quantized numbers, in the words of the
format's own description. It shares no code with Headway's readers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_WEIGHTS = "model.safetensors"
_GROUP = 32
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Written:
    """Tensors of a quantized weight, by suffix, and the weight that they stand for in float32."""

    tensors: Tensors
    dense: Tensor


@dataclass(frozen=True, slots=True)
class Method:
    """Way to quantize a checkpoint."""

    config: Mapping[str, Any]
    """The `quantization_config`."""
    write: Callable[[Tensor], Written]
    """Quantizes a weight."""
    architecture: str = "llama"
    is_quantized: Callable[[str], bool] = lambda name: name.endswith("_proj.weight")
    """Tells by its name if a weight is quantized."""


def quantize_checkpoint(plain: Path, directory: Path, method: Method) -> Path:
    """Write the checkpoint `plain` quantized to `directory`/quantized, and its dequantized weights to /dense.

    Returns:
        The directory of the quantized one.
    """
    stored = load_file(plain / _WEIGHTS)
    quantized: Tensors = {}
    dense: Tensors = {}
    for name, weight in stored.items():
        if method.is_quantized(name):
            written = method.write(weight)
            prefix = name.removesuffix(".weight")
            quantized |= {prefix + suffix: tensor.contiguous() for suffix, tensor in written.tensors.items()}
            dense[name] = written.dense.contiguous()
        else:
            quantized[name] = dense[name] = weight
    for kind, tensors in (("quantized", quantized), ("dense", dense)):
        shutil.copytree(plain, directory / kind, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, directory / kind / _WEIGHTS, {"format": "pt"})
    config = directory / "quantized" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method.config}))
    return directory / "quantized"


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack each row of numbers [rows, n] into 32-bit words, the lowest bits first; the last word is padded with 0."""
    values = numbers.numpy().astype(np.uint8)
    bit_rows = ((values[..., None] >> np.arange(bits, dtype=np.uint8)) & 1).reshape(len(values), -1)
    padded = np.pad(bit_rows, ((0, 0), (0, -bit_rows.shape[1] % 32)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())


@dataclass(frozen=True, slots=True)
class _Integers:
    """Weight as unsigned integers [outputs, inputs], and scales and zero points [outputs, groups]."""

    numbers: Tensor
    scales: Tensor
    zero_points: Tensor

    def dense(self, order: Tensor) -> Tensor:
        rows = torch.arange(len(self.numbers))[:, None]
        zero_points, scales = self.zero_points[rows, order], self.scales.float()[rows, order]
        return (self.numbers.float() - zero_points.float()) * scales


def _round(weight: Tensor, bits: int, order: Tensor, *, symmetric: bool, dtype: torch.dtype) -> _Integers:
    """Round a weight to nearest by group; `order` [inputs] is each input's group."""
    num_groups, middle = int(order.max()) + 1, 2 ** (bits - 1)
    lowest = torch.stack([weight[:, order == group].amin(1) for group in range(num_groups)], 1).clamp(max=0)
    highest = torch.stack([weight[:, order == group].amax(1) for group in range(num_groups)], 1).clamp(min=0)
    if symmetric:
        scales = (torch.maximum(-lowest, highest) / (middle - 0.5)).to(dtype)
        zero_points = torch.full(scales.shape, middle)
    else:
        scales = ((highest - lowest) / (2**bits - 1)).to(dtype)
        zero_points = (-lowest / scales.float()).round().int()
    numbers = (weight / scales.float()[:, order]).round() + zero_points[:, order]
    return _Integers(numbers.clamp(0, 2**bits - 1).int(), scales, zero_points)


def _in_order(num_inputs: int, group: int) -> Tensor:
    return torch.arange(num_inputs) // group


def _shuffled(num_inputs: int, group: int) -> Tensor:
    return _in_order(num_inputs, group)[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))]


def _packed(
    weight: Tensor, bits: int = 4, group: int = _GROUP, *, symmetric: bool = True, shuffled: bool = False
) -> Written:
    group = min(group, weight.shape[1])
    order = (_shuffled if shuffled else _in_order)(weight.shape[1], group)
    found = _round(weight, bits, order, symmetric=symmetric, dtype=torch.bfloat16)
    tensors = {
        ".weight_packed": pack(found.numbers, bits),
        ".weight_scale": found.scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = pack(found.zero_points.t(), bits).t()
    if shuffled:
        tensors[".weight_g_idx"] = order.int()
    return Written(tensors, found.dense(order))


def _awq(weight: Tensor) -> Written:
    order = _in_order(weight.shape[1], _GROUP)
    found = _round(weight, 4, order, symmetric=False, dtype=torch.float16)

    def interleaved(rows: Tensor) -> Tensor:
        """Pack eight adjacent outputs in AWQ's order: position p of a word holds output (0, 2, 4, 6, 1, 3, 5, 7)[p]."""
        return pack(rows.reshape(len(rows), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    tensors = {
        ".qweight": interleaved(found.numbers.t()),
        ".qzeros": interleaved(found.zero_points.t()),
        ".scales": found.scales.t(),
    }
    return Written(tensors, found.dense(order))


def _gptq(weight: Tensor, bits: int = 4, *, stored_below: int = 1, shuffled: bool = False) -> Written:
    order = (_shuffled if shuffled else _in_order)(weight.shape[1], _GROUP)
    found = _round(weight, bits, order, symmetric=False, dtype=torch.float16)
    tensors = {
        ".qweight": pack(found.numbers, bits).t(),
        ".qzeros": pack((found.zero_points.t() - stored_below) % 2**bits, bits),
        ".scales": found.scales.t(),
        ".g_idx": order.int(),
    }
    return Written(tensors, found.dense(order))


def _int8(weight: Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return Written({".weight": numbers, ".weight_scale": scales}, numbers.float() * scales.float())


def _float8(weight: Tensor, suffix: str = ".weight_scale", *, per_tensor: bool = False) -> Written:
    largest = weight.abs().max().reshape(1) if per_tensor else weight.abs().amax(1, keepdim=True)
    scales = largest / 448
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    tensors = {".weight": numbers, suffix: scales, ".input_scale": torch.ones(1)}
    return Written(tensors, numbers.float() * scales)


def _float8_blocks(weight: Tensor, block: tuple[int, int], suffix: str = ".weight_scale_inv") -> Written:
    height, width = block
    scales = torch.empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    dense = torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, columns = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = weight[rows, columns].abs().max() / 448
            numbers[rows, columns] = (weight[rows, columns] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[rows, columns] = numbers[rows, columns].float() * scales[i, j]
    return Written({".weight": numbers, suffix: scales}, dense)


def _mxfp4(weight: Tensor) -> Written:
    """Quantize experts [experts, inputs, outputs]; they are stored as [experts, outputs, inputs / 32, 16 bytes]."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])
    numbers = (blocks / 2**exponents)[..., None].sub(values).abs().argmin(-1)
    dense = (values[numbers] * 2**exponents).flatten(2).transpose(1, 2)
    pairs = numbers.unflatten(-1, (16, 2))
    tensors = {
        "_blocks": (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8),
        "_scales": (exponents[..., 0] + 127).to(torch.uint8),
    }
    return Written(tensors, dense)


def _nvfp4(weight: Tensor, *, is_modelopt: bool) -> Written:
    """Quantize to FP4 in groups of 16 with scales in e4m3, of which the largest is 448 times a factor for all."""
    groups = weight.unflatten(1, (-1, 16))
    largest = groups.abs().amax(-1)
    factor = largest.max() / (448 * 6)
    scales = (largest / 6 / factor).to(torch.float8_e4m3fn)
    wide = scales.float() * factor
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])
    numbers = (groups / wide[..., None])[..., None].sub(values).abs().argmin(-1)
    dense = (values[numbers] * wide[..., None]).flatten(1)
    pairs = numbers.flatten(1).unflatten(1, (-1, 2))
    stored = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
    if is_modelopt:
        more = {".weight": stored, ".weight_scale_2": factor, ".input_scale": torch.tensor(0.1)}
    else:
        more = {".weight_packed": stored, ".weight_global_scale": 1 / factor.reshape(1)}
        more[".input_global_scale"] = torch.ones(1)
    return Written({".weight_scale": scales, **more}, dense)


def _normal_float(weight: Tensor, block: int = 64, *, nested: bool = False) -> Written:
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
    scales, table = flat.abs().amax(1), torch.tensor(_NF4)
    numbers = (flat / scales[:, None])[..., None].sub(table).abs().argmin(-1).flatten()
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape),
    }  # fmt: skip
    tensors = {".weight.absmax": scales, ".weight.quant_map": table}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(scales.mean())}
        nested_table = torch.linspace(-1, 1, 256)
        rest = scales - scales.mean()
        largest = torch.stack([part.abs().max() for part in rest.split(256)])
        per_block = largest[torch.arange(len(rest)) // 256]
        codes = (rest / per_block)[:, None].sub(nested_table).abs().argmin(1)
        scales = nested_table[codes] * per_block + state["nested_offset"]
        tensors |= {
            ".weight.absmax": codes.to(torch.uint8),
            ".weight.nested_absmax": largest,
            ".weight.nested_quant_map": nested_table,
        }
    dense = (table[numbers].view(-1, block) * scales[:, None]).flatten()[: weight.numel()].view(weight.shape)
    pairs = numbers[: weight.numel()].view(-1, 2)
    tensors[".weight"] = (16 * pairs[:, 0] + pairs[:, 1]).to(torch.uint8)[:, None]
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return Written(tensors, dense)


def _llm_int8(weight: Tensor) -> Written:
    largest = weight.abs().amax(1)
    numbers = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {".weight": numbers, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Written(tensors, numbers.float() * (largest[:, None] / 127))


def _compressed(format_name: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": format_name, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def _int_weights(bits: int, strategy: str = "group", *, symmetric: bool = True) -> dict[str, Any]:
    return _compressed("pack-quantized", num_bits=bits, type="int", strategy=strategy, symmetric=symmetric)


def _gptq_config(bits: int = 4, *, desc_act: bool = False, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": _GROUP, "desc_act": desc_act, "sym": False, **more}


_INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "dynamic": True}
_FLOAT8_ACTIVATIONS = {"num_bits": 8, "type": "float", "dynamic": True}
_FLOAT8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
_NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

METHODS: dict[str, Method] = {
    "compressed-tensors W4A16": Method(_int_weights(4), _packed),
    "compressed-tensors W4A16 asymmetric": Method(
        _int_weights(4, symmetric=False), lambda weight: _packed(weight, symmetric=False)
    ),
    "compressed-tensors W4A16 ordered": Method(_int_weights(4), lambda weight: _packed(weight, shuffled=True)),
    "compressed-tensors W8A16": Method(_int_weights(8, "channel"), lambda weight: _packed(weight, 8, 10**6)),
    "compressed-tensors W8A8": Method(
        _compressed("int-quantized", _INT8_ACTIVATIONS, num_bits=8, type="int", strategy="channel"), _int8
    ),
    "compressed-tensors FP8 dynamic": Method(
        _compressed("float-quantized", _FLOAT8_ACTIVATIONS, strategy="channel", **_FLOAT8_WEIGHTS), _float8
    ),
    "compressed-tensors FP8 static": Method(
        _compressed("float-quantized", _FLOAT8_ACTIVATIONS | {"dynamic": False}, strategy="tensor", **_FLOAT8_WEIGHTS),
        lambda weight: _float8(weight, per_tensor=True),
    ),
    "compressed-tensors FP8 blocks": Method(
        _compressed(
            "float-quantized", _FLOAT8_ACTIVATIONS, strategy="block", block_structure=[48, 32], **_FLOAT8_WEIGHTS
        ),
        lambda weight: _float8_blocks(weight, (48, 32), ".weight_scale"),
    ),
    "AWQ": Method({"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm"}, _awq),
    "GPTQ": Method(_gptq_config(), _gptq),
    "GPTQ desc_act": Method(_gptq_config(desc_act=True), lambda weight: _gptq(weight, shuffled=True)),
    "GPTQ v2": Method(_gptq_config(checkpoint_format="gptq_v2"), lambda weight: _gptq(weight, stored_below=0)),
    "GPTQ 3 bits": Method(_gptq_config(3), lambda weight: _gptq(weight, 3)),
    "GPTQ 8 bits": Method(_gptq_config(8), lambda weight: _gptq(weight, 8)),
    "FP8 blocks of DeepSeek": Method(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 40]},
        lambda weight: _float8_blocks(weight, (48, 40)),
        "deepseek_v3",
    ),
    "FP8 of Llama": Method({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, _float8),
    "FP8 per tensor": Method(
        {"quant_method": "fp8", "activation_scheme": "static"}, lambda weight: _float8(weight, per_tensor=True)
    ),
    "MXFP4": Method(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, _mxfp4, "gpt_oss-window",
        lambda name: name.endswith((".gate_up_proj", ".down_proj")),
    ),
    "NVFP4 of modelopt": Method(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda weight: _nvfp4(weight, is_modelopt=True),
    ),
    "compressed-tensors NVFP4": Method(
        _compressed(
            "nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}, num_bits=4, type="float", strategy="tensor_group",
            group_size=16, symmetric=True,
        ),
        lambda weight: _nvfp4(weight, is_modelopt=False),
    ),
    "FP8 of modelopt": Method(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, lambda weight: _float8(weight, per_tensor=True)
    ),
    "bitsandbytes nf4": Method(_NF4_CONFIG, _normal_float),
    "bitsandbytes nf4 nested": Method(
        _NF4_CONFIG | {"bnb_4bit_use_double_quant": True}, lambda weight: _normal_float(weight, nested=True)
    ),
    "bitsandbytes int8": Method({"quant_method": "bitsandbytes", "load_in_8bit": True}, _llm_int8),
}  # fmt: skip
"""Map from the name of a method to it."""
