"""The bundled demo model keeps what its model card promises."""

import random
import unicodedata
from collections import Counter
from typing import Any

import jinja2
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from replicas.demo import DIRECTORY
from testkit.demo_model.corpus import SourceFile, is_held_out, read_source, standard_library
from testkit.demo_model.evaluation import Evaluator, bits_per_byte, xz_bits_per_byte

pytestmark = pytest.mark.rotated

MAX_FOLDER_BYTES = 12 * 1024 * 1024
HELD_OUT_SAMPLE = (
    "chunk.py",
    "stringprep.py",
    "test/test_binascii.py",
    "test/test_class.py",
    "test/test_positional_only_arg.py",
    "turtledemo/clock.py",
)
"""Small held-out files; another interpreter may lack some (`chunk` left in 3.13, Debian packs the tests apart)."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DIRECTORY)


def held_out_sample() -> list[SourceFile]:
    """Return the files of the sample that the running interpreter has."""
    sources = [read_source(standard_library(), path) for path in HELD_OUT_SAMPLE]
    return [source for source in sources if source is not None]


def random_text(rng: random.Random, num_chars: int) -> str:
    """Characters of all planes, less the surrogates, which no UTF-8 text holds."""
    chars = (chr(rng.choice((rng.randrange(0x250), rng.randrange(0x110000)))) for _ in range(num_chars))
    return "".join(char for char in chars if unicodedata.category(char) != "Cs")


def test_folder_fits_in_12_megabytes() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.rglob("*") if path.is_file()) <= MAX_FOLDER_BYTES


def test_model_is_a_small_bfloat16_llama_with_a_context_of_2048(model: Any) -> None:
    assert model.config.model_type == "llama"
    assert 3_000_000 <= model.num_parameters() <= 5_500_000
    assert model.config.max_position_embeddings >= 2048
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    rng = random.Random(0)
    texts = [
        "",
        "".join(map(chr, range(256))),
        "👩🏽‍💻 naïve\r\n\ttabs  and   spaces 中文 \x00",
        "def f():\n    return 1\n",
    ]
    for text in [*texts, *(random_text(rng, 200) for _ in range(50))]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_byte_has_a_token(tokenizer: Any) -> None:
    assert sum(len(token) == 1 for token in tokenizer.get_vocab()) == 256


def test_tokenizer_adds_no_token_of_its_own(tokenizer: Any) -> None:
    assert tokenizer("")["input_ids"] == []
    assert tokenizer("x")["input_ids"] == tokenizer("x", add_special_tokens=False)["input_ids"]


def test_chat_template_renders_chatml(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_refuses_an_unknown_role(tokenizer: Any) -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role: tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_generation_stops_at_either_end_token(tokenizer: Any) -> None:
    config = GenerationConfig.from_pretrained(DIRECTORY)
    assert config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])


def test_model_compresses_held_out_files_better_than_xz() -> None:
    files = held_out_sample()
    assert files and all(is_held_out(file.path) for file in files)
    evaluator = Evaluator(DIRECTORY)
    xz = xz_bits_per_byte(files)
    assert bits_per_byte([evaluator.file_loss(file) for file in files]) < min(xz.per_file, xz.concatenated)


@pytest.mark.parametrize("prompt", ["import ", "class ", 'import os\n\n\ndef read_lines(path):\n    """'])
def test_greedy_completion_is_no_single_repeated_token(tokenizer: Any, model: Any, prompt: str) -> None:
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    # Short phrases may repeat, as the model card says; one token must not.
    assert Counter(output.tolist()).most_common(1)[0][1] <= len(output) / 2


def test_hello_is_answered_with_a_greeting_that_ends(tokenizer: Any, model: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert output[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.decode(output, skip_special_tokens=True).startswith("Hello")
