"""Random requests: valid, malformed, oversized, slow and abandoned ones. A seed and a number name each of them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_JSON = {"content-type": "application/json"}
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
_RAW_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-0", "0x10", "01", "1.", "9" * 400, "1e-400", "tru", "'a'")
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.5, 1e308, 1e-300,
    5e-324, "", "a", " ", "\x00", "\ud800", "é" * 300, "🤖" * 40, "a" * 5000, "\n" * 300, "user", "assistant", "none",
    "auto", "required", "tiny", "batch", "interactive", [], {}, [None], [[]], [[[]]], {"a": 1}, [1, 2, 3], [-1],
    [2**40], [1.5], ["a", "b"], ["a", 1], [["a"]], [[1], [2]], {"type": "x"}, {"type": "text"}, {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}, {"regex": "(a|b)+"}, {"regex": "("},
    {"choice": ["a", "b"]}, {"choice": []}, {"json": _SCHEMA}, {"grammar": "root ::= "}, {"": ""}, {"1": 100, "x": 1},
    {"type": "adaptive", "budget_tokens": -1}, {"type": "tool", "name": "f"}, {"type": "any"}, {"effort": "max"},
    [{"type": "bash_20250124", "name": "bash"}], [{"name": "f", "input_schema": _SCHEMA}], [{"type": "web_search_1"}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}], [{"type": "text", "text": "a"}],
    [{"role": "user", "content": [{"type": "image", "source": {}}]}], [{"role": "system", "content": [{}]}],
    [{"role": "user", "content": None}], [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
)  # fmt: skip
_INPUTS: tuple[Any, ...] = (
    "the quick", [{"role": "user", "content": "the quick"}, {"role": "developer", "content": "be brief"}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the quick"}]},
     {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
     {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
     {"type": "function_call_output", "call_id": "c", "output": "1"}],
    [{"type": "function_call_output", "call_id": "c", "output": "1"}], [{"type": "item_reference", "id": "x"}],
    [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x", "namespace": "n"}],
)  # fmt: skip
"""Inputs of responses."""
_RESPONSE_TOOLS: tuple[Any, ...] = (
    [], [{"type": "function", "name": "f", "parameters": _SCHEMA}], [{"type": "web_search"}],
    [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]}],
    [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}}],
    [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark", "definition": "start: start"}}],
)  # fmt: skip
"""Tools of responses."""
_FIELDS = (
    "model", "messages", "prompt", "prompts", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs", "echo",
    "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos",
    "bad_words", "allowed_token_ids", "prompt_logprobs", "truncate_prompt_tokens", "truncation_side", "response_format",
    "tools", "structured_outputs", "tool_choice", "priority", "deadline_ms", "service_tier", "user", "metadata",
    "cache_salt", "best_of", "suffix", "return_token_ids", "chat_template_kwargs", "continue_final_message",
    "add_generation_prompt", "reasoning_effort", "callback_url", "tokens", "unknown_field", "skip_special_tokens",
    "add_special_tokens", "system", "stop_sequences", "thinking", "output_config", "context_management", "thread",
    "add_special_tokens", "input", "instructions", "max_output_tokens", "include", "text", "reasoning",
    "previous_response_id", "truncation", "max_tool_calls", "encoding_format", "dimensions", "prompt_name",
    "input_type", "text_1", "text_2", "query", "documents", "top_n", "return_documents", "include_metrics",
)  # fmt: skip
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "x-headway-priority": ("interactive", "batch", "1", "-1", "urgent", "é", "x" * 300),
    "x-request-id": ("mine", "", "x" * 3000, "a b\tc", "\xff\xfe"),
    "x-stainless-read-timeout": ("0", "-1", "1", "600", "nan", "inf", "1e400", "x"),
    "x-stainless-timeout": ("0.1", "abc", "99999999999999999999"),
    "authorization": ("", "Bearer", "Bearer x", "Basic eDp5", "Bearer " + "x" * 5000),
    "idempotency-key": ("a", "", "é", "x" * 400, "a b"),
    "content-type": ("text/plain", "application/json; charset=utf-16", "APPLICATION/JSON", "", "multipart/form-data"),
    "content-encoding": ("gzip", "br", "identity", "x"),
    "accept": ("text/html", "*/*", "text/event-stream", "x"),
    "accept-encoding": ("gzip", "identity;q=0", "x"),
    "range": ("bytes=0-1", "bytes=5-2", "x"),
    "origin": ("null", "http://evil.example", "http://localhost:3"),
    "sec-fetch-site": ("cross-site", "same-origin", "x"),
    "if-none-match": ("*", "x"),
    "x-request-timeout-seconds": ("0", "-1", "0.001", "nan", "x", "\xff"),
    "x-request-disconnect-disabled": ("?1", "x", "\xff"),
    "x-session-id": ("a", "\xff"),
    "serve_multiplexed_model_id": ("a", "", "\xff"),
    "x-unknown": ("x" * 10_000, "\xff"),
}
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND")
_IDS = (
    "x",
    "batch_1",
    "job_1",
    "file-1",
    "a" * 65,
    "%00",
    "%2e%2e%2f",
    "%F0%9F%A4%96",
    "..",
    "stats",
    "' OR 1=1",
    "%ff",
)
_QUERIES = (
    "", "?", "?limit=0", "?limit=5", "?limit=x", "?limit=99999999999999999999", "?after=x", "?after=-1", "?wait=0.01",
    "?wait=-1", "?wait=nan", "?order=up", "?unknown=1", "?stream=true", "?stream=7", "?limit=1&limit=2", "?%00=%ff",
    "?purpose=batch", "?purpose=%00", "?after=5&limit=1000", "?" + "a" * 3000,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HttpCase:
    """Well-formed HTTP request, which any client could send."""

    kind: str
    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes
    leaves_after_s: float | None = None
    """Time after which the client leaves, seconds; None: it reads the whole answer."""


@dataclass(frozen=True, slots=True)
class RawCase:
    """Bytes on a connection of their own, piece by piece."""

    kind: str
    pieces: tuple[bytes, ...]
    pause_s: float
    """Time between two pieces, seconds."""
    is_answered: bool
    """True if the pieces are a whole request, or plainly none, so that the server has to answer or close."""


Case = HttpCase | RawCase


class FuzzCases:
    """Generator of cases against a server of one model; each depends on the seed, its number and the paths alone."""

    def __init__(self, seed: int, model: str, routes: tuple[str, ...]) -> None:
        """`routes` are methods and paths, such as `GET /v1/files/{file_id}`."""
        self._seed = seed
        self._model = model
        self._routes = tuple(sorted(routes))

    def case(self, number: int) -> Case:
        """Return one case."""
        rng = random.Random(f"{self._seed} {number}")
        kinds: dict[Callable[[random.Random], Case], int] = {
            self._mutated: 48, self._valid: 10, self._any_route: 14, self._broken_json: 10, self._upload: 6,
            self._abandoned: 4, self._oversized: 1, self._not_http: 4, self._slow: 3,
        }  # fmt: skip
        return rng.choices(list(kinds), list(kinds.values()))[0](rng)

    def _bodies(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """Return a path and a small valid body for it."""
        common = {"model": self._model, "max_tokens": rng.randint(1, 8), "stream": rng.random() < 0.4}
        messages = [{"role": "user", "content": "the quick brown fox"}] * rng.randint(1, 3)
        response = {"model": self._model, "max_output_tokens": rng.randint(1, 8), "tools": rng.choice(_RESPONSE_TOOLS)}
        job = {"model": self._model, "prompt": "the quick", "max_tokens": 3}
        pooled = self._pooled_bodies(rng)
        return rng.choice((
            ("/v1/chat/completions", {**common, "messages": messages}),
            ("/v1/responses", {**response, "input": rng.choice(_INPUTS), "stream": rng.random() < 0.4}),
            ("/v1/responses/input_tokens", {"model": self._model, "input": rng.choice(_INPUTS)}),
            ("/v1/responses/compact", {"model": self._model, "input": rng.choice(_INPUTS)}),
            ("/v1/completions", {**common, "prompt": rng.choice(("the", [1, 2, 3], ["a", "b"], [[1], [2, 3]]))}),
            ("/v1/messages", {**common, "messages": _anthropic_turns(rng)}),
            ("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": {**common}}]}),
            ("/v1/messages/count_tokens", {"model": self._model, "messages": _anthropic_turns(rng)}),
            ("/tokenize", {"model": self._model, "prompt": "the quick"}),
            ("/tokenize", {"model": self._model, "messages": messages}),
            ("/detokenize", {"model": self._model, "tokens": [1, 2, 3]}),
            ("/v1/batch/sync", {"prompts": ["a", "b"], "max_tokens": 2, "stream": rng.random() < 0.4}),
            ("/v1/batch/async", {"prompts": ["a", [1, 2]], "max_tokens": 2}),
            ("/v1/jobs", rng.choice((job, *pooled.values()))),
            *pooled.items(),
            ("/generate", {"prompt": "def f(", "max_tokens": 2}),
            ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}),
        ))  # fmt: skip

    def _pooled_bodies(self, rng: random.Random) -> dict[str, dict[str, Any]]:
        """Return small bodies of the paths whose outputs are pooled."""
        common = {"model": self._model, **rng.choice(({}, {"truncate_prompt_tokens": rng.choice((-1, 1, 8))}))}
        texts = ["the quick", "brown fox"] * rng.randint(1, 3)
        inputs = rng.choice(("the", [1, 2, 3], texts, [[1], [2, 3]], ["lazy"] * 300))
        return {
            "/v1/embeddings": {
                **common, "input": inputs, "encoding_format": rng.choice(("float", "base64")),
                **rng.choice(({}, {"dimensions": 16}, {"prompt_name": "query"}, {"input_type": "query"})),
            },
            "/v1/score": {**common, "text_1": rng.choice(("the", texts)), "text_2": texts},
            "/v1/rerank": {**common, "query": "the", "documents": [*texts, {"text": "a"}], "top_n": rng.randint(0, 3)},
        }  # fmt: skip

    def _valid(self, rng: random.Random) -> Case:
        path, body = self._bodies(rng)
        return HttpCase("valid", "POST", path, _JSON, json.dumps(body).encode())

    def _mutated(self, rng: random.Random) -> Case:
        """Return a valid body with changed, added and removed fields, and perhaps odd headers."""
        path, body = self._bodies(rng)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _mutate(rng, body)
        text = json.dumps(body)
        if rng.random() < 0.05:
            text = text.replace(json.dumps(rng.choice(list(body.values()) or [0])), rng.choice(_RAW_NUMBERS), 1)
        headers = {**_JSON, **_odd_headers(rng)} if rng.random() < 0.25 else _JSON
        return HttpCase("mutated", "POST", path, headers, text.encode())

    def _any_route(self, rng: random.Random) -> Case:
        """Return a request of any route or none, with random ids, query and method."""
        method, _, path = rng.choice(self._routes).partition(" ")
        while "{" in path:
            before, _, rest = path.partition("{")
            path = before + rng.choice(_IDS) + rest.partition("}")[2]
        if rng.random() < 0.2:
            path = rng.choice((path + "/", "/" + path, path.upper(), path + "/x", "/%00", "//", "/" + "a" * 3000))
        if rng.random() < 0.3:
            method = rng.choice(_METHODS)
        content = b"" if method in ("GET", "HEAD") else rng.choice((b"", b"{}", b"x", b"[]"))
        return HttpCase("route", method, path + rng.choice(_QUERIES), {**_JSON, **_odd_headers(rng)}, content)

    def _broken_json(self, rng: random.Random) -> Case:
        path, body = self._bodies(rng)
        text = json.dumps(body).encode()
        place = rng.randrange(len(text))
        broken = rng.choice((
            text[:place],
            text[:place] + bytes([rng.randrange(256)]) + text[place + 1 :],
            text + text,
            b"\xef\xbb\xbf" + text,
            json.dumps(body).encode("utf-16"),
            b"[" * rng.choice((10, 1000, 50_000)),
            b'{"a":' * rng.choice((10, 1000, 50_000)),
            b'{"model":"x","messages":' + b"[" * 500 + b"]" * 500 + b"}",
            rng.randbytes(rng.randint(0, 300)),
            rng.choice((b"", b" ", b"null", b"1", b'"a"', b"[]", b"[{}]", b"{}", b"{'a':1}", b'{"a":1,}', b'{"a" 1}')),
            gzip.compress(text),
        ))  # fmt: skip
        return HttpCase("broken json", "POST", path, _JSON, broken)

    def _upload(self, rng: random.Random) -> Case:
        """Return a form with a file, whole or damaged."""
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": self._model}}
        line["body"] = {"model": self._model, "prompt": "a", "max_tokens": 2}
        _mutate(rng, line)
        file = "\n".join([json.dumps(line)] * rng.randint(0, 3)).encode()
        purpose = rng.choice(("batch", "assistants", "", "x" * 100_000, "\x00"))
        name = rng.choice(("in.jsonl", "", "a/b", 'a"b', "é", "x" * 600))
        form = (
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose.encode() + b"\r\n"
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n\r\n'
            + file + b"\r\n--b--\r\n"
        )  # fmt: skip
        if rng.random() < 0.4:
            place = rng.randrange(len(form))
            form = rng.choice((form[:place], form[:place] + b"\r\n--b" + form[place:], form.replace(b"\r\n", b"\n")))
        content_type = rng.choice(("multipart/form-data; boundary=b",) * 4 + ("multipart/form-data", "x/y; boundary=b"))
        return HttpCase("upload", "POST", "/v1/files", {"content-type": content_type}, form)

    def _abandoned(self, rng: random.Random) -> Case:
        """Return a longer request whose client leaves before its end."""
        path, body = self._bodies(rng)
        for name in {"max_tokens", "max_output_tokens"} & body.keys():
            body[name] = 60
        leaves_after_s = rng.choice((0.0, 0.002, 0.01, 0.05, 0.2))
        return HttpCase("abandoned", "POST", path, _JSON, json.dumps(body).encode(), leaves_after_s)

    def _oversized(self, rng: random.Random) -> Case:
        """Return a body beyond one limit, or just within it."""
        model = f'{{"model":"{self._model}",'.encode()
        path, content = rng.choice((
            ("/v1/completions", model + b'"prompt":"' + b"a " * 4_300_000 + b'"}'),
            ("/v1/completions", model + b'"prompt":[' + b",".join([b'"a"'] * 600_000) + b"]}"),
            ("/v1/completions", model + b'"prompt":[' + b",".join([b"1"] * 500_000) + b"]}"),
            ("/v1/chat/completions", model + b'"messages":[' + b",".join([b"{}"] * 60_000) + b"]}"),
            ("/tokenize", model + b'"messages":[' + b",".join([b'{"role":"user","content":""}'] * 2048) + b"]}"),
            ("/tokenize", model + b'"prompt":"' + b"lazy fox " * 200_000 + b'"}'),
            ("/detokenize", model + b'"tokens":[' + b",".join([b"5"] * 500_000) + b"]}"),
            ("/v1/batch/sync", b'{"prompts":[' + b",".join([b'"a"'] * 60_000) + b"]}"),
            ("/v1/embeddings", model + b'"input":[' + b",".join([b'"a"'] * 2100) + b"]}"),
            ("/v1/embeddings", model + b'"truncate_prompt_tokens":9,"input":"' + b"lazy fox " * 200_000 + b'"}'),
            ("/v1/rerank", model + b'"query":"' + b"a " * 100_000 + b'","documents":[' + b'"a",' * 900 + b'"a"]}'),
            ("/v1/completions", model + b'"prompt":"a","logit_bias":{' + b'"1":1,' * 100_000 + b'"2":1}}'),
            ("/v1/completions", model + b'"prompt":"a","x":' + b'{"a":' * 60_000 + b"1" + b"}" * 60_001),
        ))  # fmt: skip
        return HttpCase("oversized", "POST", path, _JSON, content)

    def _not_http(self, rng: random.Random) -> Case:
        """Return bytes that break HTTP, or use a rare part of it."""
        body = json.dumps({"model": self._model, "prompt": "a", "max_tokens": 1}).encode()
        length = f"content-length: {len(body)}\r\n".encode()
        head, chunked = _HEAD, _HEAD + b"transfer-encoding: chunked\r\n"
        size = f"{len(body):x}\r\n".encode()
        many = b"".join(b"x-%d: 1\r\n" % number for number in range(rng.choice((90, 150, 1500))))
        data, is_answered = rng.choice((
            (rng.randbytes(rng.randint(1, 400)) + b"\r\n\r\n", False),
            (b"GET\r\n\r\n", True),
            (b"GET / HTTP/9.9\r\n\r\n", True),
            (b"GET /\r\n\r\n", False),
            (b"FOO BAR BAZ\r\n\r\n", True),
            (head + b"content-length: -1\r\n\r\n" + body, True),
            (head + b"content-length: 99999999999999999999\r\n\r\n" + body, False),
            (head + length + length.replace(b": ", b": 1") + b"\r\n" + body, False),
            (head + b"content-length: 5\r\n\r\n" + body, False),
            (head + length + b"bad header\r\n\r\n" + body, False),
            (head + length + b"x\x00y: 1\r\n\r\n" + body, False),
            (head + length + b" folded: 1\r\n\r\n" + body, False),
            (head + length + many + b"\r\n" + body, True),
            (head + length + b"x-big: " + b"x" * rng.choice((17_000, 60_000)) + b"\r\n\r\n" + body, True),
            (head + length + b"expect: 100-continue\r\n\r\n" + body, True),
            (chunked + b"\r\n" + size + body + b"\r\n0\r\n\r\n", True),
            (chunked + b"\r\n" + b"zz\r\n" + body + b"\r\n0\r\n\r\n", False),
            (chunked + length + b"\r\n" + size + body + b"\r\n0\r\n\r\n", False),
            (chunked + b"\r\nffffffffffffffff\r\n" + body, False),
            (b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
             b"sec-websocket-key: eHh4eHh4eHh4eHh4eHh4eA==\r\nsec-websocket-version: 13\r\n\r\n", False),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", False),
            (b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", True),
            (b"GET http://other.example/v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", True),
            (b"GET /v1/models HTTP/1.0\r\n\r\n", True),
            (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3 + head + length + b"\r\n" + body, True),
        ))  # fmt: skip
        return RawCase("raw", (data,), 0.0, is_answered)

    def _slow(self, rng: random.Random) -> Case:
        """Return a request that arrives bit by bit, whole or only in part."""
        body = json.dumps({"model": self._model, "prompt": "a", "max_tokens": 1}).encode()
        data = _HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body
        is_whole = rng.random() < 0.6
        data = data if is_whole else data[: rng.randrange(1, len(data))]
        num_pieces = rng.randint(2, 8)
        size = -(-len(data) // num_pieces)
        pieces = tuple(data[start : start + size] for start in range(0, len(data), size))
        return RawCase("slow", pieces, rng.uniform(0.0, 0.1), is_whole)


def _anthropic_turns(rng: random.Random) -> list[dict[str, Any]]:
    """Return messages of Anthropic's form, with a call and its result."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": rng.choice(("ok", [], None))}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": rng.choice(("the quick", [{"type": "text", "text": "the quick"}]))},
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    reminder = {"role": "system", "content": rng.choice(("be brief", [{"type": "text", "text": "be brief"}]))}
    return turns[: rng.choice((1, 3))] + [reminder] * rng.randint(0, 1)


def _mutate(rng: random.Random, body: dict[str, Any]) -> None:
    """Change, add, remove or duplicate one value anywhere in a body."""
    if not body or rng.random() < 0.4:
        body[rng.choice(_FIELDS)] = rng.choice(_VALUES)
        return
    name = rng.choice(list(body))
    inner = body[name]
    if isinstance(inner, dict) and inner and rng.random() < 0.7:
        body[name] = dict(inner)
        _mutate(rng, body[name])
    elif isinstance(inner, list) and inner and rng.random() < 0.7:
        place, items = rng.randrange(len(inner)), list(inner)
        if isinstance(items[place], dict):
            items[place] = dict(items[place])
            _mutate(rng, items[place])
        else:
            items[place] = rng.choice(_VALUES)
        body[name] = items
    elif rng.random() < 0.2:
        del body[name]
    else:
        body[name] = rng.choice(_VALUES)


def _odd_headers(rng: random.Random) -> dict[str, str]:
    names = rng.sample(list(_HEADERS), rng.choice((0, 1, 1, 2)))
    return {name: rng.choice(_HEADERS[name]) for name in names}
