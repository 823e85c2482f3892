"""A model whose files show that it cannot be served ends `headway serve` at once, with the reason in its last lines."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from serve_app.cli.private_cluster import free_port
from testkit.limits import LIMIT_S
from testkit.model.broken_checkpoints import DAMAGES, Damage


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_the_last_lines_say_why_it_cannot_be_served(checkpoint: Path, tmp_path: Path, damage: Damage) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    damage.apply(model)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serve_app.cli.main", "serve", str(model), "--port", str(free_port("127.0.0.1"))),
        env={**os.environ, "HOME": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(LIMIT_S):
        output = (await process.communicate())[0].decode()
    last_lines = output.splitlines()[-5:]
    assert process.returncode == 2
    assert damage.reason in "\n".join(last_lines) and str(model) in last_lines[-1]
    assert "Traceback" not in output and "Starting" not in output
