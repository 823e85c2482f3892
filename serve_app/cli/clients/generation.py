"""Generation of text by a server: the options of `headway chat` and `headway complete`, and the streamed answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from replicas.protocol import Band
from serve_app.cli.clients.client import ServerClient
from serve_app.cli.clients.events import JsonObject
from serve_app.cli.clients.terminal import counted

BandName = Literal["interactive", "standard", "batch"]

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Name of the model; not needed if the server has one model.")
]
TemperatureOption = Annotated[float | None, typer.Option(min=0, help="Randomness; 0: always the most probable token.")]
TopPOption = Annotated[float | None, typer.Option(min=0, max=1, help="Share of the most probable tokens to draw from.")]
SeedOption = Annotated[int | None, typer.Option(help="Seed of the random numbers.")]
MaxTokensOption = Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")]
BandOption = Annotated[BandName | None, typer.Option("--band", help="Priority. Default: standard.", show_default=False)]
STOPPED = 130
"""Exit status of a command whose answer Ctrl-C has stopped."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of a generation; None: the server's default."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    band: BandName | None = None
    max_tokens: int | None = None

    def fields(self) -> JsonObject:
        """Return the fields of a request for the options that are given."""
        named = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "priority": None if self.band is None else int(Band[self.band.upper()]),
            "max_tokens": self.max_tokens,
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Answer:
    """Text that a server has generated."""

    text: str
    finish_reason: str | None
    """Reason of its end that the server gives, such as `stop` or `length`."""
    num_tokens: int | None = None
    """Tokens of the answer as the server has counted them; None: it did not say."""
    times_s: tuple[float, ...] = ()
    """Moments at which its parts came, seconds after the request was sent."""
    is_stopped: bool = False
    """True if Ctrl-C has stopped it."""

    @property
    def speed(self) -> str:
        """Tokens, seconds and tokens per second after the first; empty if the server did not count."""
        if not self.num_tokens or not self.times_s:
            return ""
        first_s, last_s = self.times_s[0], self.times_s[-1]
        text = f"{counted(self.num_tokens, 'token')} in {last_s:.1f} s, the first after {first_s:.1f} s"
        return f"{text}: {(self.num_tokens - 1) / (last_s - first_s):.1f} tokens/s" if last_s > first_s else text


def stream_answer(client: ServerClient, path: str, body: JsonObject, write: Callable[[str], None]) -> Answer:
    """Send a request to a generating endpoint, write the answer's parts as they come, and return it.

    Ctrl-C ends the request, also on the server, and the answer is what has come.

    Raises:
        ServerError: the server refuses the request or breaks off.
    """
    texts: list[str] = []
    times_s: list[float] = []
    finish_reason: str | None = None
    num_tokens: int | None = None
    started_s = time.monotonic()
    with closing(client.events(path, body)) as events:
        try:
            for event in events:
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in event.get("choices") or ():
                    finish_reason = choice.get("finish_reason") or finish_reason
                    text = str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
                    if text:
                        texts.append(text)
                        times_s.append(time.monotonic() - started_s)
                        write(text)
        except KeyboardInterrupt:
            return Answer("".join(texts), None, is_stopped=True)
    return Answer("".join(texts), finish_reason, num_tokens, tuple(times_s))


def given_text(argument: str | None) -> str:
    """Return the argument of the command, or else its whole standard input."""
    try:
        text = sys.stdin.read() if argument is None else argument
        text.encode()
    except UnicodeError:
        raise typer.BadParameter("the text is not UTF-8") from None
    return text
