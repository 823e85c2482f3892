"""Fixtures: the HTTP application over a fake dispatcher, in process or behind a real server, and the OpenAI client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx
import httpx2
import openai
import pytest
import uvicorn
from httpx_sse import EventSource
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from replicas.protocol import ModelCard
from router.dispatch import Dispatcher
from serve_app.http_app import Backends, IngressSettings, create_api
from serve_app.jobs.response_client import StoredResponses
from serve_app.monitoring.load_history import LoadHistory
from serve_app.openai.service import Meter
from serve_app.reference.document import api_document
from serve_app.reference.operations import Operation
from serve_app.tracing.tracer import Tracer
from testkit.http.documented_answers import CheckedApp, DocumentedAnswers
from testkit.http.memory_jobs import MemoryJobs, memory_access
from testkit.http.scripted_dispatcher import FakeDispatcher, FakeReplica, ScriptedToken
from testkit.limits import LIMIT_S, until

MODEL = "tiny"
REPLY = "hello wörld 👋, how are you today?"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the user speaks first') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of 320 tokens with a chat template, saved in `name_or_path`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, how are you today? the quick brown fox jumps over it"] * 8, trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE)
    fast.save_pretrained(directory)
    fast.name_or_path = str(directory)
    return fast


@pytest.fixture(scope="session")
def script(tokenizer: PreTrainedTokenizerFast) -> list[ScriptedToken]:
    """Return `REPLY` token by token."""
    return scripted(tokenizer, REPLY)


def scripted(tokenizer: PreTrainedTokenizerFast, text: str) -> list[ScriptedToken]:
    """Return a text token by token; a split character's text comes with its last token, as in the engine."""
    tokens: list[ScriptedToken] = []
    token_ids = tokenizer.backend_tokenizer.encode(text).ids
    shown = ""
    for index, token_id in enumerate(token_ids):
        beginning = tokenizer.backend_tokenizer.decode(token_ids[: index + 1])
        beginning = shown if beginning.endswith("\ufffd") else beginning
        tokens.append(ScriptedToken(token_id, beginning[len(shown) :]))
        shown = beginning
    return tokens


@dataclass
class Api:
    """Application under test, with clients for it."""

    replica: FakeReplica
    dispatcher: FakeDispatcher
    app: Any
    http: httpx.AsyncClient
    openai: Any
    """The OpenAI client. Its type is `Any`: the overloads are too strict for tables of options."""
    jobs: MemoryJobs

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        async with asyncio.timeout(LIMIT_S):
            return await self.http.post(
                path, json=body, headers={key.replace("_", "-"): v for key, v in headers.items()}
            )

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "the quick", **fields})

    async def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


MakeApi = Callable[..., Api]


@pytest.fixture
async def make_api(tokenizer: PreTrainedTokenizerFast, script: list[ScriptedToken]) -> AsyncIterator[MakeApi]:
    """Yield a factory of applications; keyword arguments that it does not name are fields of `FakeReplica`.

    Fails in the end if an answer to one of the clients was not as the OpenAPI document has it.
    """
    checked: list[CheckedApp] = []
    async with contextlib.AsyncExitStack() as stack:

        def make(
            *,
            settings: dict[str, Any] | None = None,
            dispatcher: dict[str, Any] | None = None,
            job_limits: dict[str, int] | None = None,
            has_jobs: bool = True,
            stores_responses: bool = False,
            tracer: Tracer | None = None,
            meter: Meter | None = None,
            history_times: Sequence[float] = (),
            **replica: Any,
        ) -> Api:
            fake = FakeReplica(**{"script": script, **replica})
            front = FakeDispatcher(fake, **{"card": card_of(tokenizer), **(dispatcher or {})})
            options = {"model": tokenizer.name_or_path, "served_model_name": MODEL, **(settings or {})}
            memory = MemoryJobs()
            access = memory_access(memory, **(job_limits or {})) if has_jobs else None
            times = iter(history_times)
            history = LoadHistory(cast("Dispatcher", front), lambda: next(times))
            for _ in history_times:
                history.add_sample()
            responses = StoredResponses(access.client, 1.0) if access is not None and stores_responses else None
            backends = Backends(
                cast("Dispatcher", front), jobs=access, meter=meter, history=history, responses=responses
            )
            app = create_api(IngressSettings(**options), backends, tracer=tracer, rng=random.Random(0))
            checked.append(CheckedApp(app, documented_answers(operations_of(app))))
            transport = httpx.ASGITransport(app=checked[-1], raise_app_exceptions=False)
            http = httpx.AsyncClient(transport=transport, base_url="http://test")
            stack.push_async_callback(http.aclose)
            sdk_http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=checked[-1], raise_app_exceptions=False))
            stack.push_async_callback(sdk_http.aclose)
            client = openai.AsyncOpenAI(
                api_key="secret", base_url="http://test/v1", http_client=sdk_http, max_retries=0
            )
            return Api(fake, front, app, http, client, memory)

        yield make
    problems = [problem for app in checked for problem in app.problems]
    assert not problems, "\n".join(problems)


def operations_of(app: Any) -> tuple[Operation, ...]:
    """Return the operations of an application's routes."""
    return tuple(route.endpoint.operation for route in app.routes)


@functools.cache
def documented_answers(operations: tuple[Operation, ...]) -> DocumentedAnswers:
    """Return the answers that the document of some operations allows."""
    return DocumentedAnswers(api_document(operations, True, MODEL, "0"))


def stored_reply(text: str) -> dict[str, Any]:
    """Return a completion as the jobs service stores it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 0,
        "model": MODEL,
        "service_tier": "flex",
        "system_fingerprint": "fp_0",
        "choices": [choice],
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}},
    }


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    """Return an application with default settings."""
    return make_api()


def card_of(tokenizer: PreTrainedTokenizerFast, max_model_len: int = 256) -> ModelCard:
    return ModelCard(
        model_id=tokenizer.name_or_path,
        max_model_len=max_model_len,
        vocab_size=len(tokenizer),
        block_size=16,
        num_blocks=100,
        num_longest=1600 / max_model_len,
        max_num_seqs=8,
        dtype="float32",
        device="cpu",
    )


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve the application on a free port of a real server; yield its base URL."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=5)
    )
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


def events(text: str) -> list[str]:
    """Return the data of a stream's events."""
    stream = httpx.Response(200, headers={"content-type": "text/event-stream"}, text=text)
    return [event.data for event in EventSource(stream).iter_sse()]


def refusal(response: httpx.Response) -> tuple[int, str | None, str | None]:
    """Return the status of a response, and the code and the field in its error object."""
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]
