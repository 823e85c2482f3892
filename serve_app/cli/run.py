"""Command `headway run`: chat with a model; where no server answers, with one that lasts as long as the chat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import httpx
import typer

from serve_app.cli.clients.chat import ChatSession, converse
from serve_app.cli.clients.client import DEFAULT_URL, KeyOption, ServerClient, ServerError, UrlOption, connected
from serve_app.cli.clients.conversation import Conversation
from serve_app.cli.clients.generation import Sampling
from serve_app.cli.clients.terminal import fail

if TYPE_CHECKING:
    from serve_app.config import HeadwayConfig

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_READY = "Serving "
"""Beginning of the line that a server prints once it answers."""
_STEP = "Starting "
_ERROR = "error: "
_POLL_PERIOD_S = 0.1


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name, directory, GGUF file or hub id.")],
    message: Annotated[
        str | None, typer.Argument(metavar="MESSAGE", help="Question; prints the answer and ends.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message.")] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Chat with MODEL; where no server answers, start one that stops with the chat."""
    from serve_app.preflight.fields import ConfigError, read_fields  # only here, since pydantic takes a while

    try:
        config = read_fields({"model": model})
    except ConfigError as error:
        fail(str(error))
    with connected(url, api_key) as client:
        name, names = config.model_name, _served_names(client)
        if names is None:
            with _server(config, url, api_key):
                converse(ChatSession(client, name, Conversation(system), Sampling()), message)
        elif name in names:
            converse(ChatSession(client, name, Conversation(system), Sampling()), message)
        else:
            other = f"stop that server, or name a free address: `headway run {model} --url http://127.0.0.1:8001`"
            fail(f"{url} serves {', '.join(names) or 'no model'} and not {name}; {other}")


def _served_names(client: ServerClient) -> list[str] | None:
    """Return the names of a server's models; None: nothing listens at its address."""
    try:
        return client.models()
    except ServerError as error:
        if isinstance(error.__cause__, httpx.ConnectError):
            return None
        raise


@contextmanager
def _server(config: HeadwayConfig, url: str, api_key: str | None) -> Iterator[None]:
    """Run `headway serve` in a session of its own, which Ctrl-C does not reach, until the context ends."""
    from replicas.errors import ModelLoadError
    from serve_app.cli.server.served_model import directory_of

    address = httpx.URL(url)
    if address.scheme != "http" or address.host not in _LOOPBACK_HOSTS or address.path not in ("", "/"):
        fail(f"nothing answers at {url}, and a server can be started at an address of this machine only")
    try:
        if config.model is not None:
            directory_of(config.model)  # here, where its progress can be seen
    except (ModelLoadError, OSError) as error:
        fail(f"model: {error}")
    program = ["serve", config.model or config.model_name, "--no-access-log"]
    program += ["--host", address.host, "--port", str(address.port or 80)]
    environment = os.environ | ({} if api_key is None else {"HEADWAY_API_KEY": api_key})
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    with tempfile.NamedTemporaryFile(prefix="headway-run-", suffix=".log") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli.main", *program],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            _wait_until_ready(child, Path(output.name))
            yield
        finally:
            _stop(child)


def _wait_until_ready(child: subprocess.Popen[bytes], output: Path) -> None:
    """Show the steps of a server's start until it is ready; end the command with its reason if it fails."""
    from serve_app.cli.server.serve_log import Tail
    from serve_app.cli.server.start_report import Steps

    tail = Tail(output)
    with closing(Steps(sys.stderr)) as steps:
        while True:
            has_ended = child.poll() is not None  # before its last lines are read
            for line in tail.new_lines():
                if line.startswith(_READY):
                    return
                if line.startswith(_STEP):
                    steps.begin(line)
            if has_ended:
                break
            time.sleep(_POLL_PERIOD_S)
    text = output.read_text(errors="replace").strip()
    fail(text[text.rfind(_ERROR) + len(_ERROR) :] if _ERROR in text else f"the server has ended: {text}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Stop the server, and wait for its end; Ctrl-C ends its requests at once."""
    while child.poll() is None:
        child.terminate()
        with suppress(KeyboardInterrupt):
            child.wait()


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)
