"""Events written around their text: the same bytes as the chunks' objects give, for every protocol that streams."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.protocol import FinishReason, PositionLogprobs, TokenDelta, TokenLogprob, Usage
from serve_app.openai.reply.chat_format import ChatFormat
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import TEXT_PLACE, CompletionFormat, ReplyFormat, ReplyHead, event, null_usage
from serve_app.openai.request.schema import ChatBody, CompletionBody, EncodedPrompt
from serve_app.openai.tokenize.prompt_tokenizer import TokenText
from serve_app.openai.tools.detection import adapted
from serve_app.openai.tools.families import family_named
from serve_app.openai.tools.parser import OutputParser
from serve_app.protocols.messages.conversion import adapted_message
from serve_app.protocols.responses.conversion import adapted_response
from tests.unit.openai.reply.test_reasoning_usage import byte_tokenizer
from tests.unit.openai.tools.cases import CALLS, HARD_TEXT, TOOLS

HEAD = ReplyHead(id="chatcmpl-0", created=7, model='m "ü"', system_fingerprint="fp", service_tier="default")
TOKEN_TEXT = TokenText(byte_tokenizer())
FAMILY = adapted(family_named("hermes"), "<think>")
MESSAGES = [{"role": "user", "content": "hi"}]
TEXTS = st.lists(
    st.text(max_size=12)
    | st.sampled_from(
        [TEXT_PLACE, HARD_TEXT, "<think>", "</think>", FAMILY.calls.write(CALLS), "\u2028\x7f\b", "🙂", ""]
    ),
    max_size=8,
)
BODIES: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"logprobs": True},
    {"return_token_ids": True},
    {"n": 2},
    {"include_reasoning": False},
]
Make = Callable[[], ReplyFormat]


def parser() -> OutputParser:
    return OutputParser(FAMILY, TOOLS, random.Random(1))


def chat(fields: dict[str, Any], has_parser: bool) -> tuple[Make, ChatBody]:
    body = ChatBody.model_validate({"model": "m", "messages": MESSAGES, "stream": True, **fields})
    return partial(ChatFormat, HEAD, body, [1], TOKEN_TEXT, parser if has_parser else None), body


def completion(fields: dict[str, Any]) -> tuple[Make, CompletionBody]:
    body = CompletionBody.model_validate({"model": "m", "prompt": "hi", "stream": True, **fields})
    return partial(CompletionFormat, HEAD, body, [EncodedPrompt((1,), "hi")], TOKEN_TEXT), body


def message(fields: dict[str, Any]) -> tuple[Make, ChatBody]:
    case = adapted_message({"model": "m", "stream": True, **fields})
    return partial(case.reply.make, HEAD, case.chat, [1], TOKEN_TEXT, parser), case.chat


def response(fields: dict[str, Any]) -> tuple[Make, ChatBody]:
    case = adapted_response({"model": "m", "stream": True, "input": "hi", **fields})
    make: Any = case.reply.make
    return partial(make, HEAD, case.chat, [1], TOKEN_TEXT, parser, clock=lambda: 0.0), case.chat


CASES = [
    *(chat(fields, has_parser) for fields in BODIES for has_parser in (False, True)),
    *(completion(fields) for fields in [*BODIES[:2], {"logprobs": 1}, {"return_token_ids": True}, {"echo": True}]),
    message({"messages": MESSAGES, "max_tokens": 9}),
    response({}),
    response({"reasoning": {"summary": "auto"}}),
    response({"include": ["message.output_text.logprobs"]}),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@settings(deadline=None, max_examples=40)
@given(texts=TEXTS, seed=st.integers(0, 9))
def test_written_events_are_the_bytes_of_the_chunks(case: tuple[Make, Any], texts: list[str], seed: int) -> None:
    make, body = case
    written, reference = make(), make()
    rng = random.Random(seed)
    for place, text in enumerate(texts):
        position = PositionLogprobs(TokenLogprob(7, -0.5), (TokenLogprob(7, -0.5),))
        is_last = place == len(texts) - 1 and rng.random() < 0.7
        delta = TokenDelta(
            "r", place, (7,), text, Usage(1, place + 1, 0), logprobs=(position,) if body.logprobs else (),
            finish_reason=FinishReason.STOP if is_last else None,
        )  # fmt: skip
        item = IndexedDelta(rng.randrange(body.n), delta)
        assert written.opening(item.index) == reference.opening(item.index)
        expected = b"".join(event(chunk | null_usage(body)) for chunk in reference.chunks(item))
        assert written.written(item) == expected
    if texts:
        assert written.closing({}, USAGE) == reference.closing({}, USAGE)


USAGE: dict[str, Any] = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
