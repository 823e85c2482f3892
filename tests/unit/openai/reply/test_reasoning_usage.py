"""Usage of a chat whose model reasons: its reasoning tokens are counted, shown or not, streamed or whole."""

import random
from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from replicas.protocol import FinishReason, TokenDelta, Usage
from serve_app.openai.reply.chat_format import ChatFormat
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import ReplyHead
from serve_app.openai.request.schema import ChatBody
from serve_app.openai.tokenize.prompt_tokenizer import TokenText
from serve_app.openai.tools.detection import adapted
from serve_app.openai.tools.families import family_named
from serve_app.openai.tools.parser import OutputParser

REASONING = "<think>One and one."
OUTPUT = f"{REASONING}</think>It is 2."


def byte_tokenizer() -> Tokenizer:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("include_reasoning", [True, False])
def test_reasoning_tokens_are_in_the_usage_of_all_replies(include_reasoning: bool) -> None:
    tokenizer = byte_tokenizer()
    family = adapted(family_named("hermes"), "<think>")
    messages = [{"role": "user", "content": "1 + 1?"}]
    body = ChatBody.model_validate({"model": "m", "messages": messages, "include_reasoning": include_reasoning})
    delta = TokenDelta(
        request_id="r",
        text=OUTPUT,
        token_ids=tuple(tokenizer.encode(OUTPUT).ids),
        start=0,
        usage=Usage(1, len(OUTPUT), 0),
        finish_reason=FinishReason.STOP,
    )
    make_parser = partial(OutputParser, family, [], random.Random(1), False)

    def chat_format() -> ChatFormat:
        head = ReplyHead(id="r", created=0, model="m", system_fingerprint="fp", service_tier="default")
        return ChatFormat(head, body, [1], TokenText(tokenizer), make_parser)

    whole = chat_format().full_reply([delta], {"completion_tokens": len(OUTPUT)})
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(REASONING)}
    streamed = chat_format()
    streamed.chunks(IndexedDelta(0, delta))
    assert streamed.usage_details() == {"completion_tokens_details": {"reasoning_tokens": len(REASONING)}}
