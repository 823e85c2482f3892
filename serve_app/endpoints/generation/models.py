"""Endpoints of the served model and its tokenizer: GET /v1/models, POST /tokenize and /detokenize."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of, json_response
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.request.schema import TOKENIZE_IGNORED, DetokenizeBody, TokenizeBody
from serve_app.openai.request.validation import check_model, check_num_tokens, check_token_ids
from serve_app.openai.service import KnownModel
from serve_app.openai.tokenize.prompt_encoder import ChatTurns
from serve_app.openai.tokenize.prompt_tokenizer import PromptTokenizer
from serve_app.protocols.messages.answers import ModelInfo, ModelInfoList, model_info
from serve_app.reference.answers import DetokenizeReply, ModelList, ModelObject, TokenizeReply, TokenizerInfo
from serve_app.reference.operations import BODY_FAILURES, LOOKUP_FAILURES, Fields, Operation

ANTHROPIC_VERSION = "anthropic-version"
"""Header of requests of Anthropic's API."""
_VERSIONS = frozenset({ANTHROPIC_VERSION})


class ModelEndpoints:
    """Endpoints that show the served model and use its tokenizer."""

    def __init__(
        self, bodies: BodyReader, model: KnownModel, tokenizer: PromptTokenizer, created_unix_s: float
    ) -> None:
        """Create the endpoints; `created_unix_s` is the time when this process started, shown as `created`."""
        self._bodies = bodies
        self._model = model
        self._tokenizer = tokenizer
        self._created_unix_s = created_unix_s

    @Operation("GET", "/v1/models", "Model", ModelList | ModelInfoList, failures=frozenset({503}), headers=_VERSIONS)
    async def models(self, request: Request) -> Response:
        """List the served model."""
        data = [await self._described(request, name) for name in self._model.names]
        if ANTHROPIC_VERSION not in request.headers:
            return json_response({"object": "list", "data": data})
        return json_response({"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]})

    @Operation(
        "GET",
        "/v1/models/{model_id:path}",
        "Model",
        ModelObject | ModelInfo,
        failures=LOOKUP_FAILURES,
        headers=_VERSIONS,
    )
    async def model(self, request: Request) -> Response:
        """Show the served model."""
        name = request.path_params["model_id"]
        check_model(name, self._model.names)
        return json_response(await self._described(request, name))

    @Operation(
        "POST",
        "/tokenize",
        "Model",
        TokenizeReply,
        failures=BODY_FAILURES | LOOKUP_FAILURES,
        bodies=(Fields(TokenizeBody, TOKENIZE_IGNORED),),
    )
    async def tokenize(self, request: Request) -> Response:
        """Encode a prompt, or messages with the model's chat template."""
        owner = caller_of(request).owner_before_parsing
        body = await self._bodies.read(request, TokenizeBody, TOKENIZE_IGNORED)
        check_model(body.model, self._model.names)
        card = await self._model.card()
        token_ids = await self._token_ids(body, card.max_model_len, owner)
        token_strs = await self._tokenizer.token_strings(token_ids, owner) if body.return_token_strs else None
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": card.max_model_len,
                "tokens": token_ids,
                "token_strs": token_strs,
            }
        )

    @Operation(
        "POST",
        "/detokenize",
        "Model",
        DetokenizeReply,
        failures=BODY_FAILURES | LOOKUP_FAILURES,
        bodies=(Fields(DetokenizeBody, {}),),
    )
    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        owner = caller_of(request).owner_before_parsing
        body = await self._bodies.read(request, DetokenizeBody, {})
        check_model(body.model, self._model.names)
        card = await self._model.card()
        check_num_tokens("tokens", body.tokens, card.max_model_len)
        check_token_ids("tokens", body.tokens, card.vocab_size)
        return json_response({"prompt": await self._tokenizer.decode(body.tokens, owner)})

    @Operation("GET", "/tokenizer_info", "Model", TokenizerInfo)
    async def tokenizer_info(self, request: Request) -> Response:
        """Describe the tokenizer and the chat template.

        Its fields are vLLM's, and the template's family.
        """
        return json_response(self._tokenizer.info())

    async def _token_ids(self, body: TokenizeBody, max_model_len: int, owner: WorkOwner) -> tuple[int, ...]:
        """Return the token ids; they may exceed `max_model_len`, but a text that certainly does is refused."""
        if body.messages is not None:
            prompt = await self._tokenizer.encode_chat(
                ChatTurns.of(body),
                max_prompt_tokens=max_model_len,
                add_special_tokens=body.add_special_tokens is True,
                owner=owner,
            )
        else:
            texts = [] if body.prompt is None else [body.prompt]
            (prompt,) = await self._tokenizer.encode_prompts(
                texts,
                max_prompt_tokens=max_model_len,
                add_special_tokens=body.add_special_tokens is not False,
                owner=owner,
            )
        return prompt.token_ids

    async def _described(self, request: Request, name: str) -> JsonObject:
        """Return the description of the model in the form of the API that the request is of."""
        card = await self._model.card()
        if ANTHROPIC_VERSION in request.headers:
            return model_info(name, self._created_unix_s, card.max_model_len)
        return {
            "id": name,
            "object": "model",
            "created": int(self._created_unix_s),
            "owned_by": "headway",
            "root": self._model.name if Path(card.model_id).is_absolute() else card.model_id,
            "parent": None,
            "max_model_len": card.max_model_len,
        }
