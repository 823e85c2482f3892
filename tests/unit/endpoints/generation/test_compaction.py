"""The completion of a summary: it is the caller's own, in its band, and counts for its tenant and its key."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from replicas.protocol import Band
from serve_app.keys.key_file import digest_of
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from testkit.http.api import MODEL, Api, MakeApi, card_of, refusal, scripted

ITEMS = [
    {"role": "user", "content": "hello"}, {"role": "assistant", "content": "the quick"},
    {"role": "user", "content": "brown fox"},
]  # fmt: skip
COMPACTING = {"context_management": [{"type": "compaction", "compact_threshold": 16}], "store": False}
NUM_TOKENS = 4
MINUTE_S, UNITS_S = 60.0, {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass
class Meter:
    completions: list[PreparedCompletion] = field(default_factory=list)

    def ended(self, prepared: PreparedCompletion) -> None:
        self.completions.append(prepared)


def metered(make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, folder: Path, **limits: int) -> tuple[Api, Meter]:
    keys, meter = folder / "keys.yaml", Meter()
    keys.write_text(json.dumps({digest_of("secret"): {"tenant": "acme", **limits}}))
    dispatcher = {"card": card_of(tokenizer, max_model_len=1024)}
    api = make_api(
        settings={"api_key_file": str(keys)}, dispatcher=dispatcher, stores_responses=True, meter=meter,
        script=scripted(tokenizer, "so far"), stops_at=NUM_TOKENS,
    )  # fmt: skip
    api.http.headers["authorization"] = "Bearer secret"
    return api, meter


async def test_the_summary_is_made_in_the_callers_band_for_its_tenant(
    make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    api, meter = metered(make_api, tokenizer, tmp_path)
    for path, fields, num_completions in (
        ("/v1/responses/compact", {}, 1), ("/v1/responses", COMPACTING, 2),
        ("/v1/responses", {**COMPACTING, "stream": True}, 2), ("/v1/responses", {"store": False}, 1),
    ):  # fmt: skip
        meter.completions.clear()
        api.replica.started.clear()
        response = await api.post(path, {"model": MODEL, "input": ITEMS, "priority": 2, **fields})
        assert response.status_code == 200, response.text
        assert [completion.account for completion in meter.completions] == ["acme"] * num_completions
        assert [completion.progress.completion_tokens for completion in meter.completions] == [4] * num_completions
        started = [(request.band, request.tenant) for request in api.replica.started]
        assert started == [(Band.BATCH, "acme")] * num_completions
        assert len({request.request_id for request in api.replica.started}) == num_completions


async def test_the_tokens_of_a_summary_count_for_the_key(
    make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    api, meter = metered(make_api, tokenizer, tmp_path, tokens_per_minute=1)
    response = await api.post("/v1/responses", {"model": MODEL, "input": ITEMS, **COMPACTING})
    assert response.status_code == 200, response.text
    summary, answer = (completion.progress for completion in meter.completions)
    num_tokens = summary.prompt_tokens + summary.completion_tokens + answer.prompt_tokens
    parts = re.findall(r"([\d.]+)([hms])(?!s)", response.headers["x-ratelimit-reset-tokens"])
    reset_s = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    # The key gets a token a minute; the time that the test itself takes is far less than the summary's.
    assert (num_tokens - 10) * MINUTE_S < reset_s <= num_tokens * MINUTE_S


async def test_a_conversation_to_compact_is_given_or_stored(make_api: MakeApi) -> None:
    refused = await make_api(stores_responses=True).post("/v1/responses/compact", {"model": MODEL})
    assert refusal(refused) == (400, "missing_required_parameter", "input")


async def test_without_a_store_nothing_is_compacted(make_api: MakeApi) -> None:
    refused = await make_api().post("/v1/responses", {"model": MODEL, "input": ITEMS, **COMPACTING})
    assert refusal(refused) == (400, "unsupported_parameter", "context_management")
