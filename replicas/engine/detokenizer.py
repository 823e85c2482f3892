"""Text of a growing sequence: never half a character, never part of a stop string."""

from __future__ import annotations

from replicas.engine.interfaces import IncrementalDecoder


class Detokenizer:
    """Output text of one sequence, and the search for its stop strings.

    Text that could be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, decoder: IncrementalDecoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held = ""
        self.stop_string: str | None = None
        """The stop string that was found; no text follows it."""

    def push(self, token_id: int, may_stop: bool) -> str:
        """Text that can be shown now; sets `stop_string` when one is complete and `may_stop`."""
        text = self._decoder.push(token_id)
        if not self._stop:
            return text
        self._held += text
        if not may_stop:
            # Text from before `min_tokens` is no part of any later match.
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
        """The text still held back, once no further token follows."""
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _possible_start_length(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
