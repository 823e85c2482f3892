"""The kernels are compiled once however many ask for them, and a machine without a compiler is served as well."""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replicas.model.attention_choice import choose_attention
from replicas.model.cpp_attention import CppAttention
from replicas.model.gather_attention import GatherAttention
from replicas.model.kernel_build import KernelBuildError, built_library
from replicas.model.loader import load_model
from replicas.model.options import DEFAULT_KERNEL_CACHE_DIR, ModelOptions
from replicas.protocol import SamplingParams
from tests.model.compiled import need_kernels
from tests.model.serving import build_engine, random_prompts, reference_model, reference_tokens, tokens
from tests.model.tiny import write_checkpoint


def counting_compiler(directory: Path) -> str:
    """A compiler that takes a while, notes that it ran, and gives the library compiled before."""
    directory.mkdir()
    compiler = directory / "compiler"
    library = built_library(DEFAULT_KERNEL_CACHE_DIR)
    compiler.write_text(
        f'#!/bin/sh\necho ran >> {directory}/runs\nsleep 1\nfor last; do :; done\ncp {library} "${{last#-o}}"\n'
    )
    compiler.chmod(0o700)
    return str(compiler)


def build(directory: str, compiler: str) -> int:
    return len(built_library(directory, (compiler,)).read_bytes())


def test_of_those_who_ask_at_once_one_compiles(tmp_path: Path) -> None:
    need_kernels()
    compiler = counting_compiler(tmp_path / "bin")
    arguments = [(str(tmp_path / "kernels"), compiler)] * 3
    with ThreadPoolExecutor(3) as pool:  # The lock is among open files, so that threads stand for processes.
        sizes = list(pool.map(build, *zip(*arguments, strict=True)))
    assert sizes == [built_library(DEFAULT_KERNEL_CACHE_DIR).stat().st_size] * 3
    assert (tmp_path / "bin" / "runs").read_text().split() == ["ran"]


def test_nothing_is_left_of_a_failed_compilation(tmp_path: Path) -> None:
    false = shutil.which("false")
    assert false is not None
    with pytest.raises(KernelBuildError, match="failed"):
        built_library(str(tmp_path / "kernels"), (false,))
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["lock"]


def test_missing_compiler_and_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="no-such-compiler"):
        built_library(str(tmp_path / "kernels"), ("no-such-compiler",))
    (tmp_path / "file").touch()
    with pytest.raises(KernelBuildError, match="file"):
        built_library(str(tmp_path / "file" / "kernels"), ("true",))


def test_replica_serves_without_kernels_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_checkpoint(tmp_path, with_tokenizer=False)
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        loaded = load_model(
            ModelOptions(str(path), dtype="float32", kernel_cache_dir=str(tmp_path / "file" / "kernels"))
        )
    assert "without compiled CPU kernels" in caplog.text
    assert not loaded.has_kernels and choose_attention(loaded.attention_spec(16), "auto") is GatherAttention
    prompts = random_prompts((5, 40))
    expected = reference_tokens(reference_model(path), prompts, 8)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    assert (
        tokens(build_engine(loaded, attention=choose_attention(loaded.attention_spec(16), "auto")), prompts, params)
        == expected
    )


def test_replica_with_kernels_uses_them(tmp_path: Path) -> None:
    need_kernels()
    path = write_checkpoint(tmp_path, with_tokenizer=False)
    loaded = load_model(ModelOptions(str(path), dtype="float32"))
    assert loaded.has_kernels and choose_attention(loaded.attention_spec(16), "auto") is CppAttention
