"""The processor's features. The module imports no torch, so `headway serve` can ask at once."""

from __future__ import annotations

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
_NATIVE_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def has_bfloat16(cpu_info: Path = CPU_INFO) -> bool:
    """Return True if the processor computes bfloat16 natively."""
    return bool(_NATIVE_BFLOAT16_FLAGS & cpu_flags(cpu_info))


def value_bytes_on_cpu(dtype: str) -> int:
    """Return the size of a number in a model on the CPU, for the setting `dtype`."""
    return _VALUE_BYTES["bfloat16" if dtype == "auto" and has_bfloat16() else dtype.replace("auto", "float32")]


def cpu_flags(cpu_info: Path = CPU_INFO) -> frozenset[str]:
    """Return the processor's feature flags; empty if the system does not list them."""
    if not cpu_info.exists():
        return frozenset()
    for line in cpu_info.read_text().splitlines():
        if line.startswith(("flags", "Features")):  # x86, ARM
            return frozenset(line.partition(":")[2].split())
    return frozenset()
