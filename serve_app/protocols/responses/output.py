"""Output items of a response, made of what a parser reads of the model's output, with the events of their stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.openai.reply.format import TEXT_PLACE, JsonObject, TextEvent
from serve_app.openai.tools.shapes.calls import CallArguments, CallBegin, Content, Event, Reasoning
from serve_app.protocols.responses.custom_input import InputReader
from serve_app.protocols.responses.toolset import ToolName


@dataclass(frozen=True, slots=True)
class PartForm:
    """Form of an item's only part, which holds its text."""

    type: str
    place: str
    """Field of the item with its parts."""
    event: str
    """Begin of the names of the events about the part."""
    index: str
    """Field of the events with the part's index."""
    fields: tuple[str, ...] = ()
    """Lists that the part has beside its text."""


@dataclass(frozen=True, slots=True)
class ItemForm:
    """Form of an item: its only text, and where that stands."""

    type: str
    id_prefix: str
    event: str
    """Begin of the names of the events about the text."""
    field: str
    """Field with the whole text, in the item or its part and in the text's last event."""
    part: PartForm | None = None
    """Part with the text; None: the text is a field of the item."""


MESSAGE = ItemForm(
    "message",
    "msg",
    "response.output_text",
    "text",
    PartForm("output_text", "content", "response.content_part", "content_index", ("annotations", "logprobs")),
)
REASONING = ItemForm(
    "reasoning",
    "rs",
    "response.reasoning_text",
    "text",
    PartForm("reasoning_text", "content", "response.content_part", "content_index"),
)
SUMMARY = ItemForm(
    "reasoning",
    "rs",
    "response.reasoning_summary_text",
    "text",
    PartForm("summary_text", "summary", "response.reasoning_summary_part", "summary_index"),
)
FUNCTION_CALL = ItemForm("function_call", "fc", "response.function_call_arguments", "arguments")
CUSTOM_TOOL_CALL = ItemForm("custom_tool_call", "ctc", "response.custom_tool_call_input", "input")
COMPACTION = ItemForm("compaction", "cmp", "response.compaction", "encrypted_content")


@dataclass(slots=True)
class OutputItem:
    """Item of the output, and the events about it."""

    form: ItemForm
    id: str
    index: int
    """Place among the output's items."""
    fields: JsonObject
    """Fields that do not change."""
    text: str = ""
    logprobs: list[JsonObject] = field(default_factory=list)
    status: str = "in_progress"
    text_event: TextEvent | None = None
    """Events that add text without log probabilities; None: there were none yet."""

    def view(self) -> JsonObject:
        """Return the item as it is now; an item that is in progress has no part yet."""
        item: JsonObject = {"id": self.id, "type": self.form.type, "status": self.status, **self.fields}
        if self.form.part is None:
            return {**item, self.form.field: self.text}
        return {**item, self.form.part.place: [] if self.status == "in_progress" else [self._part()]}

    def begin(self) -> Iterator[JsonObject]:
        """Yield the events with which the item begins."""
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.view()}
        if self.form.part is not None:
            yield self._event(f"{self.form.part.event}.added", part=self._part())

    def add(self, text: str, logprobs: Sequence[JsonObject] = ()) -> Iterator[JsonObject]:
        """Add a piece of the text and yield its event."""
        self.text += text
        self.logprobs += logprobs
        yield self._event(f"{self.form.event}.delta", delta=text, **self._shown(logprobs))

    def written(self, text: str) -> bytes:
        """Add a piece of the text and return its event as bytes, in place of `add`."""
        self.text += text
        if self.text_event is None:
            self.text_event = TextEvent(self._event(f"{self.form.event}.delta", delta=TEXT_PLACE, **self._shown(())))
        return self.text_event.written(text)

    def end(self, status: str) -> Iterator[JsonObject]:
        """End the item with a status and yield the events of its end."""
        self.status = status
        yield self._event(f"{self.form.event}.done", **{self.form.field: self.text}, **self._shown(self.logprobs))
        if self.form.part is not None:
            yield self._event(f"{self.form.part.event}.done", part=self._part())
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.view()}

    def _event(self, kind: str, **fields: object) -> JsonObject:
        place = {} if self.form.part is None else {self.form.part.index: 0}
        return {"type": kind, "item_id": self.id, "output_index": self.index, **place, **fields}

    def _part(self) -> JsonObject:
        assert self.form.part is not None
        lists = {name: list(self.logprobs) if name == "logprobs" else [] for name in self.form.part.fields}
        return {"type": self.form.part.type, "text": self.text, **lists}

    def _shown(self, logprobs: Sequence[JsonObject]) -> JsonObject:
        return {"logprobs": list(logprobs)} if self.form is MESSAGE else {}


class Output:
    """Output of a response: its items, and the events about them.

    The whole answer's items and a stream's events come from the same calls, and depend on the parser's events alone.
    Ids of items follow from the response's id and the item's index.

    Invariant: at most the last item is in progress.
    """

    def __init__(
        self,
        response_id: str,
        names: Mapping[str, ToolName],
        has_summary: bool = False,
        encrypt: Callable[[str], str] | None = None,
    ) -> None:
        """Create the output.

        Args:
            response_id: Id of the response.
            names: Tools by the names of their functions.
            has_summary: True if the reasoning is a summary.
            encrypt: Function that makes the `encrypted_content` of a reasoning; None: it has none.
        """
        self.items: list[OutputItem] = []
        self._suffix = response_id.partition("_")[2]
        self._names = names
        self._reasoning = SUMMARY if has_summary else REASONING
        self._encrypt = encrypt
        self._input: InputReader | None = None
        """Reader of the open custom call's input; None: the open item is another."""

    @property
    def open(self) -> OutputItem | None:
        """Item that is in progress; None: there is none."""
        return self.items[-1] if self.items and self.items[-1].status == "in_progress" else None

    def add(self, events: Sequence[Event], logprobs: Sequence[JsonObject] = ()) -> Iterator[JsonObject]:
        """Add what is read of the output, and yield the events for the client; its first text has log probabilities."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._within(MESSAGE, {"role": "assistant"})
                    yield from self.items[-1].add(text, logprobs)
                    logprobs = ()
                case Reasoning(text):
                    yield from self._within(self._reasoning, {"summary": []})
                    yield from self.items[-1].add(text)
                case CallBegin(_, call_id, name):
                    yield from self._begin_call(call_id, self._names.get(name, ToolName(name)))
                case CallArguments(_, text):
                    shown = text if self._input is None else self._input.add(text)
                    yield from self.items[-1].add(shown) if shown else ()

    def add_compaction(self, content: str) -> Iterator[JsonObject]:
        """Add a compaction with its encrypted content, and yield its events; it comes whole."""
        index = len(self.items)
        item = OutputItem(COMPACTION, f"{COMPACTION.id_prefix}_{self._suffix}_{index}", index, {}, content)
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": index, "item": item.view()}
        item.status = "completed"
        yield {"type": "response.output_item.done", "output_index": index, "item": item.view()}

    def written(self, piece: Event) -> bytes | None:
        """Add a piece of the open item's text and return its event as bytes; None: `add` has to add the piece."""
        form = MESSAGE if isinstance(piece, Content) else self._reasoning
        if isinstance(piece, Content | Reasoning) and (item := self.open) is not None and item.form is form:
            return item.written(piece.text)
        return None

    def finish(self, is_whole: bool, logprobs: Sequence[JsonObject] = ()) -> Iterator[JsonObject]:
        """End the output and yield the events of its end; `is_whole` is False if it was cut off.

        The log probabilities are of tokens behind the last text.
        """
        item = self.open
        if item is not None:
            item.logprobs += logprobs
        yield from self._end(is_whole)

    def _is_whole(self, item: OutputItem) -> bool:
        """Return True if a call has all of its arguments."""
        if self._input is not None:
            return self._input.has_ended
        try:
            return isinstance(json.loads(item.text), dict)
        except ValueError:
            return False

    def _within(self, form: ItemForm, fields: JsonObject) -> Iterator[JsonObject]:
        """Yield the events that begin an item of this form; none if it is open."""
        if self.open is None or self.open.form is not form:
            yield from self._begin(form, fields)

    def _begin_call(self, call_id: str, name: ToolName) -> Iterator[JsonObject]:
        fields: JsonObject = {"call_id": call_id, "name": name.name}
        fields |= {} if name.namespace is None else {"namespace": name.namespace}
        yield from self._begin(CUSTOM_TOOL_CALL if name.is_custom else FUNCTION_CALL, fields)
        self._input = InputReader() if name.is_custom else None

    def _begin(self, form: ItemForm, fields: JsonObject) -> Iterator[JsonObject]:
        yield from self._end(is_whole=True)
        index = len(self.items)
        self.items.append(OutputItem(form, f"{form.id_prefix}_{self._suffix}_{index}", index, fields))
        yield from self.items[-1].begin()

    def _end(self, is_whole: bool) -> Iterator[JsonObject]:
        """End the open item, if there is one; a call tells by itself if it is whole."""
        item, reader = self.open, self._input
        if item is None:
            return
        is_whole = self._is_whole(item) if item.form.part is None else is_whole
        self._input = None
        rest = "" if reader is None else reader.finish()
        if rest:
            yield from item.add(rest)
        if self._encrypt is not None and item.form is self._reasoning:
            item.fields = {**item.fields, "encrypted_content": self._encrypt(item.text)}
        yield from item.end("completed" if is_whole else "incomplete")
