"""Check of a checkpoint on one machine: its files, its architecture, and the memory of replicas on a processor."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from replicas.model.hardware.limits import available_memory_bytes
from replicas.model.loading.checks import check_config, shapes_digest
from replicas.model.loading.facts import ModelFacts, choose_max_model_len
from replicas.model.loading.memory import check_memory, replica_memory
from serve_app.config import HeadwayConfig
from serve_app.models.progress import working
from serve_app.models.torch_process import run_module
from serve_app.models.whole_files import write_whole

_CHECK_CPU_LIMIT_S = 120.0
"""Most processor time of the check by transformers, seconds. It takes 5 to 30, by the number of layers."""
_CHECKS = Path("~/.cache/headway/checked-models")
"""Folder with a file for each model that can be served. It holds `ModelFacts`.

It is named by a hash of the config, the weights' shapes, the facts' names, the check's version and transformers'.
"""
_CHECK_VERSION = "4"


def check_checkpoint(directory: Path, config: HeadwayConfig, num_replicas: int, freed_bytes: int = 0) -> None:
    """Check a checkpoint by its files, then by transformers in a process of its own: this one must not import torch.

    `num_replicas` new replicas must fit into the memory of this machine, together with `freed_bytes` of processes that
    end before. What the other process takes is known only then, so memory is checked twice. The first check needs no
    second.

    Raises:
        ModelLoadError: the checkpoint cannot be served, or not with these settings.
    """
    check_config(directory)
    options = config.replica_options()
    needed = replica_memory(directory, options.model, options.runner, options.limits)
    has_gpu = may_use_gpu(config)
    if not has_gpu:
        check_memory(needed, directory, available_memory_bytes() + freed_bytes, num_replicas)
    facts = _facts_of(directory)
    choose_max_model_len(facts.longest, options.model.max_model_len)
    if not has_gpu:
        facts.check_cache(options.model, options.runner, options.limits)
    if not has_gpu and facts.process_bytes is not None:
        measured = needed.with_process(facts.process_bytes)
        check_memory(measured, directory, available_memory_bytes() + freed_bytes, num_replicas)


def may_use_gpu(config: HeadwayConfig) -> bool:
    """Return True if replicas may run on a GPU, as far as the configuration and this machine's driver tell."""
    num_gpus = config.num_gpus_per_replica
    has_gpu = bool(shutil.which("nvidia-smi") if num_gpus is None else num_gpus)
    return has_gpu and config.replica_options().model.device != "cpu"


def _facts_of(directory: Path) -> ModelFacts:
    """Have transformers build the model without values in a process of its own, which takes seconds: once for each.

    Raises:
        ModelLoadError: it cannot.
    """
    names = [field.name for field in fields(ModelFacts)]  # Facts of another version of this program are not read.
    versions = f"{_CHECK_VERSION} {names} {version('transformers')}"
    digest = hashlib.sha256((versions + shapes_digest(directory)).encode()).hexdigest()
    passed = _CHECKS.expanduser() / digest[:24]
    if passed.exists():
        return ModelFacts.read(passed.read_text())
    with working("Checking the model ..."):
        written = run_module(
            "the check of the model",
            "replicas.model.loading.check_model",
            str(directory),
            cpu_limit_s=_CHECK_CPU_LIMIT_S,
        )
    with contextlib.suppress(OSError):  # the next start then checks again
        passed.parent.mkdir(parents=True, exist_ok=True)
        write_whole(passed, written)
    return ModelFacts.read(written)
