"""Picture of a first session for the README: `python -m bench.pictures.terminal_picture > docs/images/terminal.svg`.

It runs the commands against a real server with the default model, and draws what they print.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

PORT = 8000
WIDTH = 116
_NUM_REQUESTS = 200
_LIMIT_S = 300.0
_HEADWAY = (sys.executable, "-m", "serve_app.cli.main")
_FONT_FACES = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
_REQUEST = (
    '{"custom_id": "%s", "method": "POST", "url": "/v1/completions", '
    '"body": {"model": "SmolLM2-135M-Instruct", "prompt": "The sea is", "max_tokens": 24}}\n'
)


class Session:
    """Session in a terminal, drawn line by line."""

    def __init__(self) -> None:
        self._console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)

    def show(self, command: str, output: str) -> None:
        """Draw a command and its output."""
        self._console.print(Text(f"$ {command}", style="bold green"))
        self._console.print(Text(output.strip().replace(str(Path.home()), "/home/you") + "\n"))

    def svg(self) -> str:
        """Return the picture, without references to other sites."""
        return _FONT_FACES.sub("", self._console.export_svg(title="headway"))


@contextmanager
def served(session: Session) -> Iterator[None]:
    """Serve the default model; draw the start, and the stop at the end."""
    command = [*_HEADWAY, "serve", "--port", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("Ctrl-C"):
                break
        session.show("headway serve", "".join(line for line in lines if not line.lstrip().startswith("curl")))
        yield
    finally:
        server.terminate()
        server.communicate(timeout=_LIMIT_S)


def run(*arguments: str, text: str | None = None) -> str:
    """Return what a command prints."""
    done = subprocess.run(
        [*_HEADWAY, *arguments], input=text, capture_output=True, text=True, timeout=_LIMIT_S, check=True
    )
    return done.stdout + done.stderr


def main() -> None:
    """Print the picture."""
    session = Session()
    with served(session):
        question = "What is the capital of France?"
        session.show(f'echo "{question}" | headway chat', run("chat", text=question))
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(_REQUEST % number for number in range(_NUM_REQUESTS))
            file.flush()
            output = run("batch", "submit", file.name, "--endpoint", "/v1/completions", "--wait")
        session.show("headway batch submit requests.jsonl --endpoint /v1/completions --wait", output)
    print(session.svg())


if __name__ == "__main__":
    main()
