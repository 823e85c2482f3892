"""Conversation of a user with a model, and its file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from serve_app.cli.clients.events import JsonObject

_MAX_FILE_BYTES = 1_000_000


class UnfitFile(Exception):
    """Failure to read a file as text. The message has its path and the reason."""


class NotAConversation(UnfitFile):
    """Failure to read a file as a conversation. The message is the reason."""


def quoted_file(path: Path) -> str:
    """Return the part of a message that has a text file: its name, and its content between fences.

    Raises:
        UnfitFile: it is too large, or no text in UTF-8; OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise UnfitFile(f"{path} is no file")
    with path.open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        size = decimal(path.stat().st_size)
        raise UnfitFile(f"{path} has {size}; a file in a message may have {decimal(_MAX_FILE_BYTES)}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnfitFile(f"{path} is no text in UTF-8: byte {error.start} is {content[error.start]:#04x}") from None
    if "\0" in text:
        raise UnfitFile(f"{path} is no text: it has zero bytes")
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"


@dataclass(frozen=True, slots=True)
class Turn:
    """Question of the user and the model's answer."""

    question: str
    answer: str
    """Empty if the model has not answered; such a turn is not sent."""


class Conversation:
    """System message and turns of a chat.

    Its file is the body of a chat completion: a JSON object with `messages`.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Turn] = []

    def messages(self, question: str | None = None) -> list[JsonObject]:
        """Return the messages of all answered turns, and after them the question."""
        turns = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            if turn.answer:
                turns.append({"role": "user", "content": turn.question})
                turns.append({"role": "assistant", "content": turn.answer})
        return turns if question is None else [*turns, {"role": "user", "content": question}]

    def save(self, path: Path, model: str) -> None:
        """Write the conversation to a file; replace that file only if it is a conversation.

        Raises:
            NotAConversation: the file is something else.
        """
        if path.exists():
            Conversation.load(path)
        text = json.dumps({"model": model, "messages": self.messages()}, indent=2, ensure_ascii=False)
        path.write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read the conversation in a file.

        Raises:
            NotAConversation: the file has another form; OSError: it cannot be read.
        """
        try:
            messages = json.loads(path.read_text(encoding="utf-8-sig"))["messages"]
            pairs = [(message["role"], message["content"]) for message in messages]
        except (ValueError, KeyError, TypeError):
            raise NotAConversation(f"{path} is not a conversation that /save has written") from None
        conversation = cls()
        if pairs and pairs[0][0] == "system":
            conversation.system = str(pairs.pop(0)[1])
        roles = [role for role, _ in pairs]
        if roles != ["user", "assistant"] * (len(pairs) // 2):
            raise NotAConversation(f"{path} does not alternate between the user and the assistant")
        texts = [str(content) for _, content in pairs]
        conversation.turns = [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
        return conversation
