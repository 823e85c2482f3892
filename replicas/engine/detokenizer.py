"""Detokenizer: text of a growing sequence, without incomplete characters and without parts of stop strings."""

from __future__ import annotations

from replicas.engine.interfaces import IncrementalDecoder


class Detokenizer:
    """Detokenizer of one sequence's output, which also searches for its stop strings.

    Text that could be the beginning of a stop string is held back until later text decides it.
    """

    def __init__(self, decoder: IncrementalDecoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held = ""
        self.stop_string: str | None = None
        """Stop string that was found, or None; no text follows it."""

    def push(self, token_id: int, may_stop: bool) -> str:
        """Add a token; return the text that can be shown now.

        If `may_stop` and a stop string is complete, the text ends before it and `stop_string` is set.
        """
        text = self._decoder.push(token_id)
        if not self._stop:
            return text
        self._held += text
        if not may_stop:
            # Text from before `min_tokens` is not part of any later match.
            return self._release(len(self._held))
        found = min(
            ((at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0),
            default=None,
            key=lambda match: match[0],
        )
        if found is not None:
            shown = self._release(found[0])
            self.stop_string, self._held = found[1], ""
            return shown
        return self._release(len(self._held) - self._possible_start_length())

    def finish(self) -> str:
        """Return the text still held back. Called when no token follows."""
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _possible_start_length(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
