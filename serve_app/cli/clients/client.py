"""Client of an OpenAI-compatible server, and the options `--url` and `--api-key` that every client command takes."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from httpx_sse import SSEError

from serve_app.cli.clients.events import JsonObject, StreamCut, read_events
from serve_app.cli.clients.terminal import fail, message_of

DEFAULT_URL = "http://127.0.0.1:8000"
_API = "/v1"
_MAX_NAMED_MODELS = 8
_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
ANSWER_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
"""Time-out of a request that generates text: the prompt may take minutes, and an answer may come whole."""


def root_of(url: str | None) -> str | None:
    """Return the root of a server for its URL with or without a scheme, `/v1` and a final slash; None stays None."""
    if url is None:
        return None
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parsed = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise typer.BadParameter(f"'{url}' is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise typer.BadParameter(f"'{url}' is not the URL of an HTTP server, such as {DEFAULT_URL}")
    return text.rstrip("/").removesuffix(_API).rstrip("/")


def _key_of(key: str | None) -> str | None:
    """Return a key without surrounding space; None for an empty one."""
    if key is None or not key.strip():
        return None
    if not key.strip().isascii() or not key.strip().isprintable():
        raise typer.BadParameter("the key has characters that no API key has")
    return key.strip()


UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        envvar=["HEADWAY_URL", "OPENAI_BASE_URL"],
        help="URL of the server, with or without /v1.",
        callback=root_of,
    ),
]
"""Option with the server's root URL: no `/v1`, no final slash. Its default is `DEFAULT_URL`."""
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["HEADWAY_API_KEY", "OPENAI_API_KEY"],
        help="API key, if the server requires one.",
        callback=_key_of,
    ),
]
"""Option with the API key. Its default is None."""


class ServerError(Exception):
    """Error of a server that is unreachable, refuses a request or breaks off; `may_pass`: a retry may help."""

    def __init__(self, message: str, may_pass: bool) -> None:
        super().__init__(message, may_pass)
        self.message = message
        self.may_pass = may_pass


class ServerClient:
    """Client of one server, with or without an API key; every failure of the server is a ServerError.

    `url` is the server's root. Paths begin with `/`, such as `/v1/models`.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self.url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def json(self, method: str, path: str, **options: Any) -> JsonObject:
        """Send a request and return the object that answers it; `options` are those of `httpx.Client.request`."""
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response)
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self._strange()
        return value

    def events(self, path: str, body: Mapping[str, object]) -> Generator[JsonObject]:
        """Send a request with `stream` and yield the chunks of its answer. Closing the generator ends the request.

        Raises:
            ServerError: also if an event is an error, or the stream ends before `[DONE]`.
        """
        broken_off = "the server has broken off its answer"
        yield from self._chunks(broken_off, "POST", path, json={**body, "stream": True}, timeout=ANSWER_TIMEOUT)

    def snapshots(self, path: str) -> Generator[JsonObject]:
        """Yield the events of a stream that ends when the server stops. Closing the generator ends the request.

        Raises:
            ServerError: the server refuses, or breaks off.
        """
        yield from self._chunks("the server has stopped", "GET", path)

    def download(self, path: str, target: Path) -> None:
        """Write the content that answers a GET to the file `target`, atomically."""
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with partial.open("wb") as file, self._http.stream("GET", path) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for part in response.iter_bytes():
                    file.write(part)
            partial.replace(target)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        finally:
            partial.unlink(missing_ok=True)

    def models(self) -> list[str]:
        """Return the names of the server's models."""
        return [str(model["id"]) for model in self.json("GET", f"{_API}/models").get("data", [])]

    def only_model(self) -> str:
        """Return the name of the server's model, if it has one and not several."""
        names = self.models()
        if len(names) == 1:
            return names[0]
        if not names:
            raise ServerError(f"{self.url} has no models", may_pass=True)
        named = ", ".join(names[:_MAX_NAMED_MODELS]) + (", ..." if len(names) > _MAX_NAMED_MODELS else "")
        raise ServerError(f"{self.url} has {len(names)} models; choose one with --model: {named}", may_pass=False)

    def _chunks(self, at_end: str, method: str, path: str, **options: Any) -> Generator[JsonObject]:
        """Yield the events of a stream; `at_end` is the message if it ends before `[DONE]`."""
        try:
            with self._http.stream(method, path, **options) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for chunk in read_events(response):
                    if error := chunk.get("error"):
                        message = error.get("message") if isinstance(error, dict) else error
                        raise ServerError(str(message), may_pass=True)
                    yield chunk
        except StreamCut as error:
            raise ServerError(at_end, may_pass=True) from error
        except SSEError as error:
            raise self._strange() from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except json.JSONDecodeError as error:
            message = f"the server sends an event that is not an object: {error.doc[:80]}"
            raise ServerError(message, may_pass=False) from error

    def _strange(self) -> ServerError:
        return ServerError(f"{self.url} does not answer like an OpenAI-compatible server", may_pass=False)

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        hint = "; `headway serve` starts one, --url names another" if isinstance(error, httpx.ConnectError) else ""
        return ServerError(f"cannot reach {self.url}: {message_of(error)}{hint}", may_pass=True)


@contextmanager
def connected(url: str, api_key: str | None) -> Iterator[ServerClient]:
    """Give a client whose failures end the command with a message and exit code 1."""
    client = ServerClient(url, api_key)
    try:
        yield client
    except BrokenPipeError:  # The reader of the output has gone. The server did not fail.
        raise
    except ServerError as error:
        fail(error.message)
    except OSError as error:
        fail(message_of(error))
    finally:
        client.close()


def _refusal(response: httpx.Response) -> ServerError:
    may_pass = response.status_code in (408, 429) or response.status_code >= 500
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    hint = "; give it with --api-key or HEADWAY_API_KEY" if response.status_code == httpx.codes.UNAUTHORIZED else ""
    return ServerError(f"{message} (HTTP {response.status_code}){hint}", may_pass)
