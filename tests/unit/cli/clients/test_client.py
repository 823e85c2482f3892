"""The client of the commands: the server's address, its errors, its streams."""

import asyncio
import contextlib

import pytest
import typer
from typer.testing import CliRunner

from replicas.errors import ServingError
from serve_app.cli.clients.client import DEFAULT_URL, KeyOption, ServerClient, ServerError, UrlOption
from serve_app.cli.clients.events import JsonObject
from testkit.http.api import MODEL, REPLY, Api, MakeApi, serving
from testkit.http.scripted_dispatcher import ScriptedToken
from testkit.limits import LIMIT_S

BODY = {"model": MODEL, "prompt": "the quick", "max_tokens": 12}

probe = typer.Typer()


@probe.command()
def show(url: UrlOption = DEFAULT_URL, api_key: KeyOption = None) -> None:
    print(url, api_key)


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        ({}, [], "http://127.0.0.1:8000 None"),
        ({"OPENAI_BASE_URL": "http://far:1/v1/", "OPENAI_API_KEY": "o"}, [], "http://far:1 o"),
        ({"OPENAI_BASE_URL": "http://far:1/v1", "HEADWAY_URL": "http://near:2"}, [], "http://near:2 None"),
        ({"OPENAI_API_KEY": "o", "HEADWAY_API_KEY": "h"}, ["--url", "host:8001"], "http://host:8001 h"),
        ({"HEADWAY_API_KEY": " h\n"}, [], "http://127.0.0.1:8000 h"),
        ({"HEADWAY_API_KEY": "h"}, ["--api-key", "k", "--url", "https://x/a/v1"], "https://x/a k"),
    ],
)
def test_address_and_key_come_from_options_or_environment(
    environment: dict[str, str], arguments: list[str], expected: str
) -> None:
    names = ("HEADWAY_URL", "OPENAI_BASE_URL", "HEADWAY_API_KEY", "OPENAI_API_KEY")
    result = CliRunner().invoke(probe, arguments, env=dict.fromkeys(names) | environment)
    assert result.stdout == f"{expected}\n", result.output


def test_addresses_and_keys_that_are_none_are_refused() -> None:
    for url in ("ftp://host", "http://", "http://host:port"):
        result = CliRunner().invoke(probe, ["--url", url])
        assert (result.exit_code, "URL" in result.stderr) == (2, True), result.output
    assert CliRunner().invoke(probe, ["--api-key", "a\nb"]).exit_code == 2


async def ask(api: Api) -> tuple[str, str | None]:
    """Return the text that streams, and the message of the error that ends the stream."""
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(text_of, url, BODY)


def text_of(url: str, body: JsonObject) -> tuple[str, str | None]:
    text = ""
    with contextlib.closing(ServerClient(url, None)) as client:
        try:
            for chunk in client.events("/v1/completions", body):
                text += "".join(choice["text"] for choice in chunk["choices"])
        except ServerError as error:
            return text, error.message
    return text, None


async def test_a_stream_gives_the_whole_answer(api: Api) -> None:
    text, error = await ask(api)
    assert error is None and text and REPLY.startswith(text)


async def test_line_separators_within_a_text_end_no_event(make_api: MakeApi) -> None:
    script = [ScriptedToken(number + 20, text) for number, text in enumerate("a\u2028b\x85c\x0cd\re\u2029f\x1c")]
    assert await ask(make_api(script=script)) == ("".join(token.text for token in script), None)


async def test_an_error_within_a_stream_is_raised(make_api: MakeApi) -> None:
    text, error = await ask(make_api(fail_at=5, error=ServingError("the replica burns")))
    assert text and REPLY.startswith(text)
    assert error is not None and "the replica burns" in error


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        (b"text/event-stream", b'data: {"choices": [{"text": "hel"}]}\n\n', "the server has broken off its answer"),
        (b"text/event-stream", b": wait\n\ndata: [1]\n\n", "the server sends an event that is not an object: [1]"),
        (b"text/event-stream", b"data: nonsense\n\n", "the server sends an event that is not an object: nonsense"),
        (b"text/html", b"<html>", "does not answer like an OpenAI-compatible server"),
    ],
)
async def test_a_stream_without_a_good_end_is_an_error(content_type: bytes, body: bytes, expected: str) -> None:
    async def app(scope, receive, send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]})
        await send({"type": "http.response.body", "body": body})

    async with serving(app) as url:
        text, error = await asyncio.to_thread(text_of, url, BODY)
    assert text == ("hel" if b"hel" in body else "")
    assert error is not None and error.endswith(expected)


async def test_a_refused_stream_has_the_servers_message(api: Api) -> None:
    async with serving(api.app) as url:
        _, error = await asyncio.to_thread(text_of, url, BODY | {"model": "other"})
    assert error is not None and "other" in error and error.endswith("(HTTP 404)")


async def test_the_only_model_is_found(api: Api) -> None:
    async with serving(api.app) as url:
        with contextlib.closing(ServerClient(url, None)) as client:
            assert await asyncio.to_thread(client.only_model) == MODEL
