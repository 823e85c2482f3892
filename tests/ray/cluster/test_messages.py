"""An agent's conversation over two replicas: each turn computes only what is new."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from serve_app.openai.tokenize.prompt_encoder import ChatTurns, PromptEncoder
from serve_app.protocols.messages.conversion import adapted_message
from testkit.http.message_events import checked, read_messages
from testkit.limits import LIMIT_S
from testkit.serving.raylets import Raylets
from tests.ray.conftest import MODEL_NAME

pytestmark = pytest.mark.rotated

NUM_TURNS, FIRST_WORDS, BLOCK_TOKENS = 12, 11_900, 16
TOOL_S = 0.4
"""Seconds between two turns: two polls. Until then the other ingress may believe that the replica is still at work."""
HINT = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"name": f"tool_{number}", "description": "It runs. " * 9, "input_schema": SCHEMA} for number in range(12)]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "its", "tests"]


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def body(system: str, messages: list[dict[str, Any]], header: str) -> dict[str, Any]:
    blocks = [{"type": "text", "text": header}, {"type": "text", "text": system, **HINT}]
    fields = {"system": blocks, "messages": messages, "tools": TOOLS, "stream": True, "max_tokens": 4}
    return {"model": MODEL_NAME, "thinking": {"type": "adaptive", "display": "omitted"}, **fields}


async def test_each_turn_finds_all_but_its_last_block_in_the_cache(served: Raylets, checkpoint: Path) -> None:
    rng, encoder = random.Random(9), PromptEncoder.load(str(checkpoint))
    system, reminder = text(rng, FIRST_WORDS // 2), text(rng, FIRST_WORDS // 2)
    earlier: tuple[int, ...] = ()
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "look around"},
        {"role": "system", "content": [{"type": "text", "text": reminder, **HINT}]},
    ]
    for turn in range(NUM_TURNS):
        asked = body(system, messages, f"x-anthropic-billing-header: cch={rng.random()}")
        chat = adapted_message(asked).chat
        token_ids = encoder.encode_chat(ChatTurns.of(chat), None, False).token_ids
        response = served.app.http.post(f"{served.app.url}/v1/messages", json=asked, timeout=LIMIT_S)
        assert response.status_code == 200, response.text
        usage = checked(read_messages(response.text)).message["usage"]
        cached = usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + cached == len(token_ids)
        pairs = enumerate(zip(earlier, token_ids, strict=False))
        num_common = next((place for place, (one, other) in pairs if one != other), len(earlier))
        assert cached >= num_common // BLOCK_TOKENS * BLOCK_TOKENS, f"turn {turn}: {cached} of {num_common}"
        assert turn == 0 or num_common > 25_000
        earlier = token_ids
        # Between two turns a text in blocks becomes a plain one, and `cache_control` moves to the end.
        messages[1] = {"role": "system", "content": reminder}
        for block in messages[-1]["content"] if turn else ():
            block.pop("cache_control")
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "tool_0", "input": {"command": text(rng, 3)}}
        found = text(rng, rng.randint(5, 30))
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": found, **HINT}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        await asyncio.sleep(TOOL_S)
