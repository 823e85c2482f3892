"""Command `headway complete`: continue a text."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from serve_app.cli.clients.client import ANSWER_TIMEOUT, DEFAULT_URL, KeyOption, UrlOption, connected
from serve_app.cli.clients.events import JsonObject
from serve_app.cli.clients.generation import (
    STOPPED,
    BandOption,
    ModelOption,
    Sampling,
    SeedOption,
    TemperatureOption,
    TopPOption,
    given_text,
    stream_answer,
)
from serve_app.cli.clients.markdown import plain_writer
from serve_app.cli.clients.terminal import stderr

_PATH = "/v1/completions"


def complete(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text; default: standard input.")] = None,
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 128,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, max=5, help="With --json: log probabilities of so many tokens per position.")
    ] = None,
    band: BandOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's whole answer as JSON.")] = False,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Continue PROMPT; the answer is printed as it comes."""
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs needs --json")
    text = given_text(prompt)
    with connected(url, api_key) as client:
        body: JsonObject = {"model": model or client.only_model(), "prompt": text}
        body |= Sampling(temperature, top_p, seed, band, max_tokens).fields()
        body |= {"stop": stop} if stop else {}
        if as_json:
            body |= {} if logprobs is None else {"logprobs": logprobs}
            answer = client.json("POST", _PATH, json=body, timeout=ANSWER_TIMEOUT)
            print(json.dumps(answer, indent=2, ensure_ascii=False))
            return
        with plain_writer() as write:
            streamed = stream_answer(client, _PATH, body, write)
        if streamed.is_stopped:
            raise typer.Exit(STOPPED)
        if streamed.finish_reason == "length" and sys.stderr.isatty():
            stderr().print(f"[dim](cut off after {max_tokens} tokens; see --max-tokens)[/]")
