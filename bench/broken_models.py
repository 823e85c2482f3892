"""Times until `headway serve` says why it cannot serve a model: `python -m bench.broken_models`.

Each of the damages of `testkit.model.broken_checkpoints` is done to a copy of a small model. The time is that of the
process, from its start to its end, with an empty home directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.record import write
from testkit.free_port import free_port
from testkit.model.broken_checkpoints import DAMAGES, Damage
from testkit.model.tiny_checkpoints import write_checkpoint

_LIMIT_S = 60.0
_TAIL_LINES = 5


def main() -> None:
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, damage) in enumerate(DAMAGES.items()):
            figures[name] = _refusal(damage, Path(folder) / str(number))
            print(f"{name:26}{figures[name]['seconds']:5.1f} s  status {figures[name]['exit_status']}", flush=True)
            print(f"    {figures[name]['last_line']}", flush=True)
    print(write("broken_models", {"models": figures}))


def _refusal(damage: Damage, home: Path) -> dict[str, object]:
    """Return the figures of a start with a damaged model."""
    model = write_checkpoint(home / "model")
    damage.apply(model)
    port = free_port("127.0.0.1")
    served = str(damage.served(model))
    command = [sys.executable, "-m", "serve_app.cli.main", "serve", served, "--port", str(port)]
    started_s = time.monotonic()
    ended = subprocess.run(
        command, env=os.environ | {"HOME": str(home)}, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    duration_s = time.monotonic() - started_s
    last_lines = ended.stderr.splitlines()[-_TAIL_LINES:]
    return {
        "seconds": round(duration_s, 2),
        "exit_status": ended.returncode,
        "is_told": damage.reason in "\n".join(last_lines),
        "executed": (model / "executed").exists(),
        "last_line": last_lines[-1].replace(str(home), ""),
    }


if __name__ == "__main__":
    main()
