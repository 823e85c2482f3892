"""Downloads of the hub take what a model needs, once."""

from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from replicas.text.tokenizer_files import HUB_FILES, UNUSED_HUB_FILES


def test_weights_are_fetched_in_one_format() -> None:
    needed = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    others = ["consolidated.safetensors", "onnx/config.json", "original/params.json", "model.bin", "README.md"]
    found = filter_repo_objects(needed + others, allow_patterns=HUB_FILES, ignore_patterns=UNUSED_HUB_FILES)
    assert list(found) == needed
