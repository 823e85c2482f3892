"""Compaction: contents that only one tenant's server can read, and the messages that a summary stands for."""

from typing import Any

import pytest

from replicas.errors import InvalidRequest
from serve_app.protocols.adapted_chat import AdaptedChat
from serve_app.protocols.responses.compaction import (
    ContinuedRequest,
    can_be_compacted,
    kept_items,
    most_summary_tokens,
    summary_chat,
)
from serve_app.protocols.responses.conversion import COMPACTION, REASONING, SUMMARY_HEADING, ResponseRequest
from serve_app.protocols.responses.encrypted_content import KEY_BYTES, ContentCipher

KEY = bytes(range(KEY_BYTES))
CIPHER = ContentCipher(KEY, "acme")
RULES = {"role": "developer", "content": "French."}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "1"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def compaction(text: str) -> dict[str, Any]:
    return {"type": "compaction", "encrypted_content": CIPHER.encrypt(COMPACTION, text)}


def adapted(*items: dict[str, Any], cipher: ContentCipher = CIPHER, **fields: Any) -> AdaptedChat:
    asked = ResponseRequest.of({"model": "m", "input": list(items), **fields})
    return ContinuedRequest(asked, (), cipher).adapted()


def texts(chat: AdaptedChat) -> list[str | None]:
    return [message.content for message in chat.chat.messages]


def test_a_content_is_read_by_its_tenant_alone_and_as_it_was_written() -> None:
    for text in ("", "wörld", "x" * 10_000):
        content = CIPHER.encrypt(REASONING, text)
        assert CIPHER.encrypt(REASONING, text) == content
        assert ContentCipher(KEY, "acme").decrypt(REASONING, content) == text
    content = CIPHER.encrypt(REASONING, "secret")
    assert "secret" not in content
    others = [ContentCipher(KEY, "other"), ContentCipher(KEY, ""), ContentCipher(KEY[::-1], "acme")]
    for cipher, kind in [*((other, REASONING) for other in others), (CIPHER, COMPACTION)]:
        with pytest.raises(ValueError, match="was altered"):
            cipher.decrypt(kind, content)
    altered = [content[:at] + ("B" if content[at] == "A" else "A") + content[at + 1 :] for at in range(len(content))]
    for other_content in (*altered, content[:-4], content[4:], content + "AAAA", "é", "gAAAA", "", " "):
        with pytest.raises(ValueError, match="was altered"):
            CIPHER.decrypt(REASONING, other_content)


def test_a_summary_stands_for_all_before_it_but_instructions_and_the_last_message_of_the_user() -> None:
    before = [user("one"), RULES, answer("two"), user("three"), CALL, OUTPUT]
    behind = [answer("four"), user("five")]
    chat = adapted(*before, compaction("so far"), *behind, instructions="Brief.")
    summary = f"{SUMMARY_HEADING}\nso far"
    assert texts(chat) == ["Brief.", "French.", summary, "three", "four", "five"]
    assert [chat.names[f"messages[{index}]"] for index in range(6)] == [
        "instructions", "input[1]", "input[6]", "input[3]", "input[7]", "input[8]",
    ]  # fmt: skip
    # Optional fields change nothing. A later summary replaces an earlier one.
    kept = kept_items([*before, compaction("so far")])
    assert texts(adapted(*kept, compaction("so far"), *behind, instructions="Brief.")) == texts(chat)
    again = adapted(*before, compaction("so far"), *behind, compaction("further"), answer("six"))
    assert texts(again) == ["French.", f"{SUMMARY_HEADING}\nfurther", "five", "six"]
    assert texts(adapted(compaction("so far"))) == [summary]


def test_what_is_kept_before_a_compaction_does_not_grow_with_earlier_ones() -> None:
    items: list[dict[str, Any]] = [RULES, {"type": "message", **user("0")}]
    for turn in range(1, 30):
        items += [answer("so"), user(f"{turn}")]
        kept = kept_items(items)
        items.append(compaction("so far"))
        assert [item["content"] for item in kept] == ["French.", *(["0"] if turn == 1 else []), f"{turn}"]
    assert kept_items([*kept, compaction("so far")]) == [RULES, user("29")]


def test_the_chat_for_a_summary_drops_what_does_not_fit_and_no_earlier_summary() -> None:
    items = [user("old"), compaction("so far"), answer("a"), user("b"), answer("c"), user("d"), CALL, OUTPUT]
    tool = {"type": "function", "name": "f"}
    conversation = adapted(*items, temperature=0.5, seed=7, priority=2, instructions="Brief.", tools=[tool])
    summary = summary_chat(conversation, items, CIPHER, 50)
    assert texts(summary)[:-1] == texts(conversation)
    assert "summary" in (texts(summary)[-1] or "") and summary.chat.messages[-1].role == "user"
    assert summary.droppable == ((2, 3), (4, 5), (7, 8))
    chat = summary.chat
    assert (chat.temperature, chat.seed, chat.priority, chat.max_completion_tokens) == (0.5, 7, 2, 50)
    assert not chat.tools and not chat.stream


def test_only_a_conversation_with_more_than_is_kept_is_compacted() -> None:
    for items, is_long in (
        ([user("a")], False), ([RULES, user("a")], False), ([compaction("x"), user("a")], False),
        ([user("b"), compaction("x")], False), ([user("a"), answer("b")], True), ([user("a"), user("b")], True),
        ([user("b"), compaction("x"), user("a")], True), ([compaction("x"), answer("a")], True),
    ):  # fmt: skip
        assert can_be_compacted(adapted(*items)) == is_long, items


def test_a_summary_is_bounded() -> None:
    assert most_summary_tokens(1_000_000, None) == most_summary_tokens(1_000_000, 9_000) == 2048
    assert (most_summary_tokens(4096, None), most_summary_tokens(4096, 400), most_summary_tokens(4096, 1)) == (
        1024, 100, 1,
    )  # fmt: skip


def test_a_content_that_cannot_be_read_names_its_item() -> None:
    own = {"type": "reasoning", "summary": [], "encrypted_content": CIPHER.encrypt(REASONING, "wörld")}
    chat = adapted(user("a"), own, answer("hm"))
    assert chat.chat.messages[1].reasoning_content == "wörld"
    for item in (own, compaction("x")):
        for changed, cipher in (
            ({**item, "encrypted_content": item["encrypted_content"][:-4]}, CIPHER),
            (item, ContentCipher(KEY, "other")),
        ):
            with pytest.raises(InvalidRequest, match=r"`input\[1\]`") as caught:
                adapted(user("a"), changed, cipher=cipher)
            assert (caught.value.param, caught.value.code) == ("input[1]", "invalid_encrypted_content")
