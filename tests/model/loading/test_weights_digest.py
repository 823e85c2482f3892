"""Digest of a checkpoint's weights: the same tokens may be continued on another replica, or not."""

from pathlib import Path

from replicas.model_replica import weights_digest


def checkpoint(folder: Path, content: bytes) -> str:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


def test_copies_of_a_checkpoint_have_one_digest(tmp_path: Path) -> None:
    content = bytes(500_000)
    digest = weights_digest(checkpoint(tmp_path / "a", content), "float32")
    assert digest == weights_digest(checkpoint(tmp_path / "b", content), "float32")
    for position in (10, len(content) // 2 + 10, len(content) - 10):
        other = content[:position] + b"x" + content[position + 1 :]
        assert digest != weights_digest(checkpoint(tmp_path / str(position), other), "float32")
    assert digest != weights_digest(str(tmp_path / "a"), "bfloat16")
    assert weights_digest("org/one", "float32") != weights_digest("org/two", "float32")
