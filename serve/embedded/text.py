"""Tokens to text, one token at a time: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


class TextStream:
    """Decodes a growing sequence of tokens.

    Text is held back while its last character is incomplete, and while its end could be the start of
    a stop string. `matched` is the stop string that ended the text, which is not part of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._start = self._read = 0  # ids[_start:_read] is context that has been released already
        self._held = ""
        self.matched: str | None = None

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain."""
        self._ids.append(token)
        return self._release(self._fresh(final=False), final=False)

    def finish(self) -> str:
        """Return what was held back; an incomplete character becomes U+FFFD."""
        return "" if self.matched is not None else self._release(self._fresh(final=True), final=True)

    def _fresh(self, *, final: bool) -> str:
        # Decoded with the tokens before it, since a token's text depends on its left neighbour.
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if after.endswith(REPLACEMENT) and not final:
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _release(self, fresh: str, *, final: bool) -> str:
        text = self._held + fresh
        found = [(text.index(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, self.matched = min(found)
            self._held = ""
            return text[:end]
        keep = 0 if final else self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that starts a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
