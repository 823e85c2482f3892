"""docs/clients.md is what its generator makes of the sweep's outcomes, and the gate is kept."""

import json
from pathlib import Path

from bench.clients.environments import CLIENTS, PROGRAMS
from bench.clients.page import GATE, NAME, WAYS, page
from bench.clients.scenario import SCRIPTS
from bench.record import RESULTS
from testkit.model.scripted_checkpoint import write_scripted_checkpoint

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "clients.md"


def test_the_document_is_made_from_the_outcomes() -> None:
    assert DOCUMENT.read_text() == page(), "python -m bench.clients.page > docs/clients.md"


def test_every_client_of_the_gate_passed_in_all_ways() -> None:
    clients = json.loads((RESULTS / f"{NAME}.json").read_text())["clients"]
    assert {name: clients[name]["ways"] for name in GATE} == {
        name: {way: {"outcome": "passed"} for way in WAYS} for name in GATE
    }


def test_every_client_has_a_program() -> None:
    assert {client.program for client in CLIENTS} | {"ways.py", "ways.mjs"} == {
        path.name for path in PROGRAMS.iterdir() if path.is_file()
    }
    assert set(GATE) <= {client.name for client in CLIENTS}


def test_the_scripts_make_a_checkpoint(tmp_path: Path) -> None:
    assert (write_scripted_checkpoint(tmp_path, SCRIPTS) / "model.safetensors").exists()
