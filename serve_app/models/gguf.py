"""GGUF files as checkpoints: each file is converted once, into this machine's cache."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from replicas.errors import ModelLoadError
from serve_app.models.torch_process import run_module

MODELS_DIRECTORY = Path("~/.cache/headway/models")
_CONVERT_LIMIT_S = 1800.0
CHECKPOINT_FORM = "4 or 8 bits, IQ4 in 4"
"""Form of converted checkpoints. Those of earlier forms are not used."""
_STEPS = {
    "Converting and de-quantizing GGUF tensors...": "{} of {} tensors read, {} s left",
    "Loading weights": "{} of {} tensors read, {} s left",
    "Packing tensors": "{} of {} tensors packed, {} s left",
    "Writing model shards": "writing",
}
"""Map from the title of a bar of the conversion to what is shown. All but "Packing tensors" are transformers' own."""
_BAR = re.compile(rf"({'|'.join(map(re.escape, _STEPS))}):[^\r\n]*? (\d+)/(\d+) \[[\d:]+<([\d:]+)")
_log = logging.getLogger(__name__)


def convert_once(file: Path, directory: Path, *, keeps_bits: bool = True) -> Path:
    """Convert `file` to `directory` unless that exists; return `directory`. A directory appears whole or not at all.

    With `keeps_bits`, quantized linear layers keep their bits; else all weights become bfloat16.

    Raises:
        ModelLoadError: the file cannot be converted.
    """
    if directory.is_dir():
        return directory
    from serve_app.models.progress import working  # only here: processes that need no terminal import this module

    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with working(f"Converting: {file.name}") as show, FileLock(f"{directory}.lock", timeout=_CONVERT_LIMIT_S):
            if not directory.is_dir():
                _log.info("converting a GGUF file", extra={"file": str(file), "directory": str(directory)})
                _convert(
                    file,
                    directory,
                    [] if keeps_bits else ["--dense"],
                    lambda errors: show(f"Converting{conversion_step(errors)}: {file.name}"),
                )
    except Timeout:
        raise ModelLoadError(f"another process has been converting {file} for {_CONVERT_LIMIT_S:.0f} s") from None
    return directory


def conversion_step(errors: str) -> str:
    """Return the step, as the last bar that tqdm has drawn in `errors` shows it; empty: there is no bar."""
    bars = list(_BAR.finditer(errors))
    if not bars:
        return ""
    work, done, total, left = bars[-1].groups()
    left_s = sum(int(part) * 60**power for power, part in enumerate(reversed(left.split(":"))))
    return f", {_STEPS[work].format(done, total, left_s)}"


def _convert(file: Path, directory: Path, options: list[str], watch: Callable[[str], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        arguments = (str(file), str(temporary), *options)
        run_module(f"the conversion of {file.name}", "replicas.model.loading.gguf", *arguments, watch=watch)
        temporary.chmod(0o755)
        temporary.rename(directory)
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot convert {file}: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
