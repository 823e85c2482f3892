"""HTTP application of one ingress: creates and connects the endpoints and their services, without Ray."""

from __future__ import annotations

import random
from typing import cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from replicas.clock import Clock
from replicas.errors import ServingError
from serve_app.auth import Authenticator
from serve_app.endpoints.backends import Backends
from serve_app.endpoints.batches import BatchEndpoints
from serve_app.endpoints.completions import CompletionEndpoints
from serve_app.endpoints.files import FileEndpoints
from serve_app.endpoints.jobs import JobEndpoints
from serve_app.endpoints.models import ModelEndpoints
from serve_app.endpoints.new_jobs import JobMaker
from serve_app.endpoints.new_prompts import PromptBatchMaker
from serve_app.endpoints.operations import OperationsEndpoints
from serve_app.endpoints.prompt_batches import PromptBatchEndpoints
from serve_app.endpoints.sync_prompts import SyncPromptEndpoints
from serve_app.errors import HttpError, http_failure, method_not_allowed, route_not_found
from serve_app.http.allowed_hosts import AllowedHostsMiddleware
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import ExchangeMiddleware, error_response, exchange_of
from serve_app.http.settings import IngressSettings
from serve_app.metrics import HttpMetrics
from serve_app.openai.known_model import KnownModel
from serve_app.openai.request.parsing import invalid_request
from serve_app.openai.service import CompletionService
from serve_app.openai.tokenize.prompt_tokenizer import PromptTokenizer
from serve_app.openai.tokenize.workers import WorkerThreads

__all__ = ["Backends", "IngressSettings", "create_api"]


def create_api(
    settings: IngressSettings,
    backends: Backends,
    *,
    metrics: HttpMetrics | None = None,
    rng: random.Random | None = None,
    clock: Clock | None = None,
) -> FastAPI:
    """Create the application; load the tokenizer and the key file.

    `metrics` holds the registry that `/metrics` exposes. `rng` draws the seeds of requests without one. The
    documentation pages of FastAPI are off, since they load assets from other sites.

    Raises:
        ValueError, OSError: the tokenizer or the key file cannot be used.
    """
    clock, dispatcher, jobs = clock or Clock(), backends.dispatcher, backends.jobs
    authenticator = Authenticator.from_file(settings.api_key_file)
    workers = WorkerThreads(settings.num_tokenizer_threads)
    tokenizer = PromptTokenizer.load(settings.model, workers)
    bodies = BodyReader(settings, workers)
    model = KnownModel(settings.served_model_name, dispatcher, clock.monotonic)
    metrics = metrics or HttpMetrics(settings.served_model_name)
    service = CompletionService(dispatcher, model, tokenizer, settings.limits, rng or random.Random())
    prompts = PromptBatchMaker(service, model.name)
    routes = {
        **CompletionEndpoints(settings, authenticator, bodies, service).routes(),
        **ModelEndpoints(authenticator, bodies, model, tokenizer, clock.unix()).routes(),
        **OperationsEndpoints(backends, model, metrics, settings.stall_timeout_s).routes(),
        **SyncPromptEndpoints(authenticator, bodies, prompts, settings, clock).routes(),
    }
    if jobs is not None:
        routes |= {
            **FileEndpoints(authenticator, bodies, jobs, clock).routes(),
            **BatchEndpoints(authenticator, bodies, jobs, model.name).routes(),
            **JobEndpoints(authenticator, bodies, jobs, JobMaker(service, model.name)).routes(),
            **PromptBatchEndpoints(authenticator, bodies, jobs, prompts).routes(),
        }
    exchange = Middleware(
        ExchangeMiddleware,
        metrics=metrics,
        server_sets_request_id=settings.server_sets_request_id,
        clock=clock,
    )
    hosts = Middleware(AllowedHostsMiddleware, allowed=settings.allowed_hosts)
    app = FastAPI(openapi_url=None, redirect_slashes=False, middleware=[exchange, hosts])
    for route, handler in routes.items():
        method, path = route.split()
        app.add_api_route(path, handler, methods=[method], response_model=None)
    for kind in (ServingError, HttpError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return the response with OpenAI's error object for an error of the application or the web framework."""
    return error_response(exchange_of(request), _as_error_object(request, error))


def _as_error_object(request: Request, error: Exception) -> Exception:
    """Convert an error of the web framework into an HttpError or InvalidRequest; return other errors unchanged."""
    if isinstance(error, RequestValidationError):
        return invalid_request(cast("list[ErrorDetails]", error.errors()))
    if not isinstance(error, HTTPException):
        return error
    method, path = request.method, request.url.path
    if error.status_code == 404:
        return route_not_found(method, path)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        return method_not_allowed(method, path, headers.get("Allow", ""))
    return http_failure(error.status_code, error.detail, list(headers.items()))
