"""Conversion of a GGUF file into a checkpoint of safetensors: `python -m replicas.model.loading.gguf FILE DIRECTORY`.

transformers reads the file: config, weights, tokenizer and chat template. Linear layers in the types of `gguf_blocks`
keep their numbers, scales and minima. All other weights become bfloat16; with `--dense` these layers, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, TensorNameMap, get_tensor_name_map
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PretrainedConfig, PreTrainedModel

from replicas.model.checkpoint.readers import from_gguf
from replicas.model.loading.gguf_blocks import KEPT_TYPES, Parts, read_blocks

_ROUNDING = 2.0**-7
"""Most by which two roundings of a value to bfloat16 differ, as a share of it."""
_NUM_CHECKED = 256
"""Outputs of a layer whose weights are compared with those that transformers reads."""


def convert(file: Path, directory: Path, *, keeps_bits: bool = True) -> None:
    """Write the model in `file` to `directory`, which must exist.

    Raises:
        OSError, ValueError, KeyError: transformers cannot read the file.
    """
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are plain now; with these marks transformers would refuse to save them.
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    quantized = quantized_weights(file, model) if keeps_bits else {}
    if not quantized:
        model.save_pretrained(directory)
        return
    model.config.quantization_config = {"quant_method": "gguf"}
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    save_torch_state_dict(_state(model, quantized), directory)


def quantized_weights(file: Path, model: PreTrainedModel) -> dict[str, Parts]:
    """Return the parts of those weights of linear layers whose types are in `KEPT_TYPES`, by the layers' names.

    transformers reorders some weights by output. A weight is kept only if its parts give what transformers has read.
    """
    reader = GGUFReader(file)
    stored = {tensor.name: tensor for tensor in reader.tensors if tensor.tensor_type in KEPT_TYPES}
    names = _names(reader, model.config)
    candidates = []
    for name, module in model.named_modules():
        tensor = stored.get(names.get_name(f"{name}.weight", try_suffixes=(".weight",)) or "")
        if type(module) is nn.Linear and tensor is not None and tensor.data.shape[0] == module.out_features:
            candidates.append((name, module, tensor))
    quantized = {}
    for name, module, tensor in tqdm(candidates, "Packing tensors"):
        parts = read_blocks(torch.from_numpy(tensor.data.copy()), tensor.tensor_type)
        orders = _orders(parts, model.config)
        ordered_parts = next((order for order in orders if _gives(order, module.weight)), None)
        if ordered_parts is not None:
            quantized[name] = ordered_parts
    return quantized


def _names(reader: GGUFReader, config: PretrainedConfig) -> TensorNameMap:
    """Return the map from names in transformers' models to those in the file."""
    field = reader.fields["general.architecture"]
    name = bytes(field.parts[field.data[0]]).decode()
    architecture = next(key for key, architecture_name in MODEL_ARCH_NAMES.items() if architecture_name == name)
    return get_tensor_name_map(architecture, config.get_text_config(decoder=True).num_hidden_layers)


def _orders(parts: Parts, config: PretrainedConfig) -> Iterator[Parts]:
    """Yield the parts as they are, and with the two halves of each head apart, for queries and for keys.

    GGUF files of some architectures interleave the two halves, which the position encoding rotates.
    """
    yield parts
    text = config.get_text_config(decoder=True)
    for num_heads in (text.num_attention_heads, getattr(text, "num_key_value_heads", None)):
        if num_heads and len(parts[".weight_scale"]) % (2 * num_heads) == 0:
            yield {name: _apart(part, num_heads) for name, part in parts.items()}


def _apart(part: Tensor, num_heads: int) -> Tensor:
    return part.view(num_heads, -1, 2, part.shape[1]).transpose(1, 2).reshape(part.shape)


def _gives(parts: Parts, weight: Tensor) -> bool:
    """Return True if the parts give `weight` [outputs, inputs] bfloat16, apart from roundings."""
    rows = slice(0, _NUM_CHECKED)
    values = from_gguf({name: part[rows] for name, part in parts.items()}).dense(torch.float32)
    expected = weight[rows].detach().float()
    return values.shape == expected.shape and torch.allclose(
        values, expected, _ROUNDING, 1e-6 * float(expected.abs().max())
    )


def _state(model: PreTrainedModel, quantized: Mapping[str, Parts]) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint. Of weights that share memory it has the first."""
    state: dict[str, Tensor] = {}
    seen = set()
    for name, value in model.state_dict().items():
        prefix = name.removesuffix(".weight")
        if prefix in quantized:
            state |= {prefix + suffix: part.contiguous() for suffix, part in quantized[prefix].items()}
        elif value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            state[name] = value
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dense", action="store_true", help="write all weights in bfloat16")
    options = parser.parse_args()
    try:
        convert(options.file, options.directory, keeps_bits=not options.dense)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(" ".join(str(error).split()) or repr(error))
