"""HTTP application of one ingress: creates and connects the endpoints and their services, without Ray."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from fastapi import Depends, FastAPI, params
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from replicas.errors import ServingError
from replicas.timing.clock import Clock
from serve_app.endpoints.generation.compaction import CompactionEndpoints
from serve_app.endpoints.generation.completions import CompletionEndpoints
from serve_app.endpoints.generation.conversations import ConversationEndpoints
from serve_app.endpoints.generation.messages import MessageEndpoints
from serve_app.endpoints.generation.models import ModelEndpoints
from serve_app.endpoints.generation.pooled import PooledEndpoints
from serve_app.endpoints.generation.request_status import RequestEndpoints
from serve_app.endpoints.generation.responder import Completions
from serve_app.endpoints.generation.responses import ResponseEndpoints, ResponseStore
from serve_app.endpoints.generation.stored_responses import StoredResponseEndpoints
from serve_app.endpoints.jobs.batches import BatchEndpoints
from serve_app.endpoints.jobs.files import FileEndpoints
from serve_app.endpoints.jobs.job_requests import JobRequests
from serve_app.endpoints.jobs.jobs import JobEndpoints
from serve_app.endpoints.jobs.message_batches import MessageBatchEndpoints
from serve_app.endpoints.jobs.new_batches import JobMaker, PromptBatchMaker
from serve_app.endpoints.jobs.prompt_batches import PromptBatchEndpoints
from serve_app.endpoints.jobs.sync_prompts import SyncPromptEndpoints
from serve_app.endpoints.operators.dashboard import DashboardEndpoints, Snapshots
from serve_app.endpoints.operators.operations import Backends, OperationsEndpoints
from serve_app.endpoints.operators.stored import StoredEndpoints
from serve_app.endpoints.operators.usage import UsageEndpoints
from serve_app.endpoints.pages import PageEndpoints
from serve_app.errors import HttpError, http_failure, method_not_allowed, route_not_found
from serve_app.http.access_log import AccessLog
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import error_response, exchange_of
from serve_app.http.exchange_middleware import ExchangeMiddleware, ExchangeObservers
from serve_app.http.gate import Gate, GateMiddleware
from serve_app.http.other_apis import hint_for
from serve_app.http.request_registry import RequestRegistry
from serve_app.http.settings import IngressSettings
from serve_app.http.unread_bodies import UnreadBodyMiddleware
from serve_app.http.web_pages import OriginsMiddleware, WebPageGuard
from serve_app.keys.authenticator import Authenticator, require_operator
from serve_app.keys.rate_limits import KeyLimiter
from serve_app.monitoring.families import CountsCollector
from serve_app.monitoring.http import HttpMetrics
from serve_app.openai.request.sampling_defaults import SamplingDefaults
from serve_app.openai.service import CompletionService, KnownModel, ModelText
from serve_app.openai.tokenize.prompt_encoder import encoder_of
from serve_app.openai.tokenize.worker_threads import WorkerThreads
from serve_app.reference.operations import Access, routes_of
from serve_app.tracing.tracer import Tracer

__all__ = ["Backends", "IngressSettings", "create_api"]


def create_api(
    settings: IngressSettings,
    backends: Backends,
    *,
    metrics: HttpMetrics | None = None,
    gate: Gate | None = None,
    tracer: Tracer | None = None,
    rng: random.Random | None = None,
) -> FastAPI:
    """Create the application; load the tokenizer and the key file.

    A route requires an API key where its `Access` says so, if there is a key file. `metrics` holds the registry that
    `/metrics` exposes. Closing `gate` ends the admission of requests. `rng` draws the seeds of requests without one.
    The documentation pages of FastAPI are off, since they load assets from other sites.

    Raises:
        ValueError, OSError: the tokenizer, the chat template or the key file cannot be used.
    """
    clock, dispatcher, jobs = Clock(), backends.dispatcher, backends.jobs
    key_file = None if settings.api_key_file is None else Path(settings.api_key_file)
    authenticator = Authenticator(key_file, clock.monotonic)
    forms = (settings.tool_call_parser, settings.chat_template)
    load_encoder = partial(encoder_of, settings.model, *forms)
    workers = WorkerThreads(settings.num_tokenizer_threads, limits=settings.work_limits, prepare=load_encoder)
    text = ModelText.load(settings.model, workers, *forms)
    bodies = BodyReader(settings, workers)
    defaults = SamplingDefaults.load(settings.model, settings.limits.generation_config)
    model = KnownModel(settings.model_names, dispatcher, clock.monotonic, defaults)
    metrics = metrics or HttpMetrics(settings.served_model_name)
    metrics.registry.register(CountsCollector(text.grammars.metrics))
    service = CompletionService(dispatcher, model, text, settings.limits, rng or random.Random(), backends.meter)
    registry = RequestRegistry(clock.monotonic)
    completions = Completions(settings, service, registry)
    endpoints: list[object] = [
        CompletionEndpoints(bodies, completions),
        MessageEndpoints(bodies, completions),
        *_response_endpoints(bodies, completions, backends, settings.keep_alive_s),
        PooledEndpoints(bodies, completions),
        SyncPromptEndpoints(bodies, service, settings, clock),
        RequestEndpoints(registry, None if jobs is None else jobs.client),
    ]
    if jobs is not None:
        requests = JobRequests(bodies, jobs)
        endpoints += [
            JobEndpoints(requests, JobMaker(service.checks, model.name), service),
            BatchEndpoints(requests, model.name),
            MessageBatchEndpoints(requests),
            FileEndpoints(requests, clock),
            PromptBatchEndpoints(requests, PromptBatchMaker(service.checks, model.name), service),
            UsageEndpoints(jobs.client, clock),
        ]
    gate = gate or Gate()
    endpoints += [
        ModelEndpoints(bodies, model, text.tokenizer, clock.unix()),
        PageEndpoints(model.name, workers, key_file is not None, settings.ray_dashboard_url),
        OperationsEndpoints(backends, model, metrics, settings.stall_timeout_s),
        DashboardEndpoints(Snapshots(model.name, backends, registry), gate),
    ]
    access_log = None if settings.access_log_socket is None else AccessLog(settings.access_log_socket)
    tracer = tracer or Tracer(settings.tracing, "headway-ingress", "1")
    toy_model = settings.served_model_name if settings.is_toy_model else None
    observers = ExchangeObservers(metrics, registry, tracer, access_log, settings.slow_request_s, toy_model)
    middleware = _middleware(settings, observers, clock, gate)
    app = FastAPI(openapi_url=None, redirect_slashes=False, middleware=middleware)
    _add_routes(app, endpoints, _dependencies(authenticator, backends.key_limiter or KeyLimiter(clock.monotonic)))
    for kind in (ServingError, HttpError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    return app


def _response_endpoints(
    bodies: BodyReader, completions: Completions, backends: Backends, keep_alive_s: float
) -> list[object]:
    stored, jobs = backends.responses, backends.jobs
    if stored is None or jobs is None:
        return [ResponseEndpoints(bodies, completions, None)]
    reading = StoredResponseEndpoints(stored, completions.service, keep_alive_s)
    compaction = CompactionEndpoints(bodies, completions, stored)
    making = ResponseEndpoints(bodies, completions, ResponseStore(stored, reading, compaction))
    sizes = StoredEndpoints(stored, jobs.settings.max_stored_bytes)
    return [making, compaction, reading, ConversationEndpoints(bodies, stored), sizes]


def _dependencies(authenticator: Authenticator, limiter: KeyLimiter) -> Mapping[Access, Sequence[params.Depends]]:
    """Return the checks of a request before its handler is called."""

    async def authenticate(request: Request) -> None:
        await authenticator.refresh()
        exchange_of(request).principal = authenticator.authenticate(request.headers)

    async def limit(request: Request) -> None:
        """Count a request of a limited API key, from before its body is read to its end."""
        exchange = exchange_of(request)
        use = limiter.use_of(exchange.principal.key_id, exchange.principal.limits)
        if use is not None:
            exchange.key_use = use
            use.begin()

    def require(request: Request) -> None:
        require_operator(exchange_of(request).principal)

    key = Depends(authenticate)
    return {
        Access.OPEN: (),
        Access.KEY: (key,),
        Access.LIMITED: (key, Depends(limit)),
        Access.OPERATOR: (key, Depends(require)),
    }


def _middleware(settings: IngressSettings, observers: ExchangeObservers, clock: Clock, gate: Gate) -> list[Middleware]:
    """Return the middleware from the outside in."""
    origins = settings.origins
    return [
        Middleware(UnreadBodyMiddleware),
        Middleware(OriginsMiddleware, allowed=origins),
        Middleware(
            ExchangeMiddleware,
            observers=observers,
            server_sets_request_id=settings.server_sets_request_id,
            clock=clock,
        ),
        Middleware(WebPageGuard, hosts=settings.allowed_hosts, origins=origins),
        Middleware(GateMiddleware, gate=gate),
    ]


def _add_routes(
    app: FastAPI, endpoints: Sequence[object], dependencies: Mapping[Access, Sequence[params.Depends]]
) -> None:
    """Add the declared handlers; the first route that matches a request is used."""
    for operation, handler in chain.from_iterable(routes_of(endpoint).items() for endpoint in endpoints):
        checks = dependencies[operation.access]
        app.add_api_route(operation.path, handler, methods=[operation.method], dependencies=checks, response_model=None)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return the response with OpenAI's error object for an error of the application or the web framework.

    OPTIONS, which has no route of its own, is answered here with the methods of its path.
    """
    if isinstance(error, HTTPException) and error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers={"allow": _allowed_methods(request)})
    return error_response(exchange_of(request), _as_error_object(request, error))


def _as_error_object(request: Request, error: Exception) -> Exception:
    """Convert an error of the web framework into an HttpError; return other errors unchanged."""
    if not isinstance(error, HTTPException):
        return error
    method, path = exchange_of(request).method, request.url.path
    if error.status_code == 404:
        return route_not_found(method, path, hint_for(path))
    if error.status_code == 405:
        return method_not_allowed(method, path, _allowed_methods(request))
    return http_failure(error.status_code, error.detail, list((error.headers or {}).items()))


def _allowed_methods(request: Request) -> str:
    """Return the value of the header `Allow` for a request's path, which has a route."""
    methods = {"OPTIONS"}
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))
