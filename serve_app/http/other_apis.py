"""Paths of other servers' APIs, each with what this server has in its place."""

from __future__ import annotations

from collections.abc import Mapping

_CHAT = "use POST /v1/chat/completions"
_COMPLETIONS = "use POST /v1/completions"
_MODELS = "use GET /v1/models"
_BATCHES = "use POST /v1/batches"
_ONE_MODEL = "a server has one model from its start on (`headway serve MODEL`, `headway models` on its machine)"
_EMBEDDINGS, _RERANK = "use POST /v1/embeddings", "use POST /v1/rerank"
_NO_CLASSES = "models generate, embed and score texts; use another server for classes"
_NO_VECTORS = "use POST /v1/embeddings, and keep the vectors in a store of your own"
_TEXT_ONLY = "models read and write text only"
_CONVERSATIONS = "use POST /v1/responses and POST /v1/conversations"
_NOT_STORED = "chat completions are not stored; POST /v1/responses stores its answers"
_NO_TRAINING = "models are served as they are; fine-tune elsewhere, and serve the result"
_NO_ADAPTERS = "adapters are not served; merge them into the weights"
_CACHE = "the prefix cache is cleared by a restart, and divided by a request's `cache_salt`"
_SLEEP = "replicas are given back without load by min_replicas=0 (docs/configuration.md)"
_TRACES = "set otlp_traces_endpoint (docs/configuration.md)"
_LOAD = "use GET /load and GET /metrics"
_FILES = "use POST /v1/files, and put the text into messages"
_DRAIN = "use POST /v1/replicas/{replica_id}/drain"

OTHER_APIS: Mapping[str, Mapping[str, str]] = {
    "Ollama's": {
        "/api": "use OpenAI's API below /v1 (docs/api.md)", "/api/chat": _CHAT, "/api/generate": _COMPLETIONS,
        "/api/tags": _MODELS, "/api/show": _MODELS, "/api/ps": _LOAD, "/api/version": "use GET /version",
        "/api/pull": _ONE_MODEL, "/api/push": _ONE_MODEL, "/api/create": _ONE_MODEL, "/api/copy": _ONE_MODEL,
        "/api/delete": _ONE_MODEL, "/api/blobs": _ONE_MODEL, "/api/embed": _EMBEDDINGS,
        "/api/embeddings": _EMBEDDINGS,
    },
    "llama-server's": {
        "/completion": _COMPLETIONS, "/infill": _COMPLETIONS, "/slots": _LOAD,
        "/props": "use GET /v1/models and GET /tokenizer_info", "/apply-template": "use POST /tokenize",
        "/embedding": _EMBEDDINGS, "/reranking": _RERANK, "/v1/reranking": _RERANK,
        "/lora-adapters": _NO_ADAPTERS, "/models/load": _ONE_MODEL, "/models/unload": _ONE_MODEL,
        "/v1/health": "use GET /health",
    },
    "vLLM's": {
        "/v2/embed": _EMBEDDINGS, "/pooling": _EMBEDDINGS, "/classify": _NO_CLASSES,
        "/ping": "use GET /health", "/invocations": _CHAT, "/server_info": "use GET /version and GET /v1/models",
        "/is_sleeping": _SLEEP, "/sleep": _SLEEP, "/wake_up": _SLEEP, "/reset_prefix_cache": _CACHE,
        "/start_profile": _TRACES, "/stop_profile": _TRACES, "/v1/load_lora_adapter": _NO_ADAPTERS,
        "/v1/unload_lora_adapter": _NO_ADAPTERS, "/v1/chat/completions/render": "use POST /tokenize",
        "/v1/completions/render": "use POST /tokenize", "/v1/chat/completions/batch": "use POST /v1/batch/sync",
        "/inference/v1/generate": "use POST /v1/completions with token ids as `prompt`",
        "/scale_elastic_ep": "set num_replicas and max_replicas (docs/configuration.md)", "/pause": _DRAIN,
        "/v1/tokenize": "use POST /tokenize", "/v1/detokenize": "use POST /detokenize",
        "/get_tokenizer_info": "use GET /tokenizer_info",
    },
    "Text Generation Inference's": {
        "/generate_stream": "use POST /v1/completions with `stream`", "/info": _MODELS,
    },
    "Anthropic's": {
        "/v1/complete": _COMPLETIONS,
    },
    "OpenAI's": {
        "/v1/assistants": _CONVERSATIONS, "/v1/threads": _CONVERSATIONS, "/v1/chat/completions": _NOT_STORED,
        "/v1/moderations": _NO_CLASSES, "/v1/vector_stores": _NO_VECTORS,
        "/v1/images": _TEXT_ONLY, "/v1/audio": _TEXT_ONLY, "/v1/videos": _TEXT_ONLY, "/v1/realtime": _TEXT_ONLY,
        "/v1/fine_tuning": _NO_TRAINING, "/v1/fine-tunes": _NO_TRAINING, "/v1/evals": _BATCHES,
        "/v1/uploads": "use POST /v1/files", "/v1/containers": _FILES, "/v1/edits": _CHAT,
        "/v1/engines": _COMPLETIONS, "/v1/organization": "use GET /v1/usage and `headway keys`",
        "/chat/completions": f"{_CHAT}: the base URL ends in /v1",
        "/embeddings": f"{_EMBEDDINGS}: the base URL ends in /v1",
        "/responses": "use POST /v1/responses: the base URL ends in /v1",
        "/completions": f"{_COMPLETIONS}: the base URL ends in /v1", "/models": f"{_MODELS}: the base URL ends in /v1",
        "/batches": f"{_BATCHES}: the base URL ends in /v1", "/files": "use /v1/files: the base URL ends in /v1",
        "/v1/v1": "the base URL ends in one /v1",
    },
}  # fmt: skip
"""Paths of each API that are no routes here, with the rest of the sentence that refuses them and all below them."""

_HINTS = {path: f"it is {api} API; {hint}" for api, hints in OTHER_APIS.items() for path, hint in hints.items()}


def hint_for(path: str) -> str | None:
    """Return what to use in place of a path of another API, found by its longest beginning; None: it is unknown."""
    while path and path not in _HINTS:
        path = path.rpartition("/")[0]
    return _HINTS.get(path)
