"""A model whose files show that it cannot be served ends `headway serve` at once, with the reason in its last line."""

import pickle
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from testkit.free_port import free_port
from testkit.model.broken_checkpoints import DAMAGES, Damage, pickle_weights
from testkit.model.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.rotated

TROUBLESHOOTING = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"


def documented_messages() -> list[re.Pattern[str]]:
    """Return patterns of the messages of a model that troubleshooting.md explains."""
    messages = re.findall(r"`(model: .+?)`", TROUBLESHOOTING.read_text())
    return [re.compile(re.escape(message).replace(re.escape("..."), ".+")) for message in messages]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_last_line_says_why_it_cannot_be_served(tmp_path: Path, damage: Damage) -> None:
    model = write_checkpoint(tmp_path / "model")
    damage.apply(model)
    served = str(damage.served(model))
    result = CliRunner().invoke(app, ["serve", served, "--port", str(free_port("127.0.0.1"))])
    last_line = result.stderr.splitlines()[-1]
    assert result.exit_code == 2
    assert damage.reason in last_line and served in last_line
    assert any(pattern.fullmatch(last_line.removeprefix("error: ")) for pattern in documented_messages())
    assert result.stdout == ""
    assert not (model / "executed").exists()


def test_the_pickle_would_run_code(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    pickle_weights(model)
    pickle.loads((model / "pytorch_model.bin").read_bytes())
    assert (model / "executed").exists()
