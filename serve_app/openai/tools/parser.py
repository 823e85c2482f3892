"""Parser of a model's output, which arrives in pieces: content, reasoning and calls."""

from __future__ import annotations

import random
from collections.abc import Sequence

from serve_app.openai.tools.families import ChatFamily
from serve_app.openai.tools.shapes.calls import Event, Sink, Tool, random_id
from serve_app.openai.tools.shapes.reader import Reader, Wait

MAX_MALFORMED = 100
"""Blocks of an output that turn out to be no calls, after which the rest of it is text.

Each may be read up to the end of the text, so their number needs a bound.
"""


class OutputParser:
    """Parser of one choice's text.

    Text that may be the begin of a marker is held back until that is decided. A marker that turns out to be text is
    content, as it stands. White space around calls and reasoning is dropped.

    Invariant: the events of a text, their pieces joined, do not depend on how the text was split.
    """

    def __init__(
        self,
        family: ChatFamily,
        tools: Sequence[Tool],
        rng: random.Random,
        starts_in_reasoning: bool = False,
        whole_calls: bool = False,
    ) -> None:
        """Create a parser.

        Args:
            family: Family of the model's chat template.
            tools: Tools that the model may call. Without tools nothing is taken for a call.
            rng: Source of the calls' ids.
            starts_in_reasoning: True if the prompt ends within the reasoning.
            whole_calls: True to report a call when it is complete, so that a malformed one stays text. Otherwise its
                name and its arguments are reported as they arrive, and a call that breaks then stays a call.
        """
        self._family = family
        self._starts_in_reasoning = starts_in_reasoning
        self._reader = Reader()
        self._sink = Sink(tools, lambda: random_id(rng, family.id_prefix, family.id_length), whole_calls)
        self._is_calling = bool(tools) or self._has_channels
        self._num_failed = 0
        self._steps = self._run()
        self._is_running = True

    @property
    def reasoning_end(self) -> str | None:
        """Marker at the end of the reasoning; None if the model does not reason."""
        return None if self._family.reasoning is None else self._family.reasoning.end

    @property
    def num_malformed(self) -> int:
        """Number of calls that were malformed or cut off."""
        return self._sink.num_malformed

    @property
    def num_calls(self) -> int:
        """Number of calls reported so far."""
        return self._sink.num_calls

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, and each one reported so far is whole and valid."""
        return self._sink.num_calls > 0 and self._sink.num_broken == 0

    def push(self, text: str) -> list[Event]:
        """Add text; return the events that it decides."""
        self._reader.push(text)
        return self._step()

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""
        self._reader.is_complete = True
        return self._step()

    def _step(self) -> list[Event]:
        if self._is_running and next(self._steps, self) is self:
            self._is_running = False
        return self._sink.take_events()

    def _run(self) -> Wait[None]:
        reader = self._reader
        if self._family.reasoning and not self._has_channels:
            yield from self._read_reasoning(self._family.reasoning.begin, self._family.reasoning.end)
        yield from self._read_opening()
        while (marker := (yield from reader.read_text(self._markers(), self._sink.add_content))) is not None:
            num_calls = self._sink.num_calls
            yield from reader.accept_words(marker)
            if marker in self._family.answer_markers:
                reader.settle()
            elif not (yield from self._read_block()) and self._sink.num_calls == num_calls:
                yield from self._give_back(marker)

    def _read_opening(self) -> Wait[None]:
        """Read a block that has no marker, if the answer begins with one."""
        reader, openings = self._reader, self._family.calls.openings
        if openings and self._sink.tools:
            yield from reader.skip_space()
            opening = yield from reader.accept(openings)
            if opening is not None:
                reader.position -= len(opening)
                yield from self._read_block()
        reader.rewind()

    def _read_reasoning(self, begin: str, end: str) -> Wait[None]:
        reader = self._reader
        yield from reader.skip_space()
        # An end without a begin is that of an empty reasoning: MiniMax M3 answers so.
        opened = yield from reader.accept((begin,) if self._starts_in_reasoning else (begin, end))
        if opened is None and not self._starts_in_reasoning:
            reader.rewind()
            return
        if opened == end:
            yield from self._drop_space()
            return
        yield from self._drop_space()
        if (yield from reader.read_text((end,), self._sink.add_reasoning)):
            yield from reader.accept_words(end)
            yield from self._drop_space()

    def _read_block(self) -> Wait[bool]:
        """Read a block of calls; move back to what is no call."""
        is_block = yield from self._family.calls.read(self._reader, self._sink)
        if is_block:
            yield from self._drop_space()
        self._num_failed += not is_block
        self._reader.rewind()
        return is_block

    def _give_back(self, marker: str) -> Wait[None]:
        """Report a marker that begins no call, and the white space before it."""
        reader = self._reader
        yield from reader.accept_words(marker)
        self._sink.add_content(reader.text[reader.held : reader.position])
        reader.settle()

    def _markers(self) -> tuple[str, ...]:
        """Return the markers at which the text ends now."""
        calls = self._family.calls
        is_calling = self._is_calling and self._num_failed < MAX_MALFORMED
        begins = (calls.begin, *calls.other_begins) if is_calling else ()
        return tuple(filter(None, (*begins, *self._family.answer_markers)))

    def _drop_space(self) -> Wait[None]:
        yield from self._reader.skip_space()
        self._reader.settle()

    @property
    def _has_channels(self) -> bool:
        """True if the shape of calls reads the reasoning and the answer too."""
        return bool(self._family.reasoning and self._family.reasoning.answer_begin)
