"""Text of one sequence, token by token: whole characters only, and never a part of a stop string.

What is released, put together, is the decoding of all output tokens at once, cut before the first stop string. So the
text does not depend on the prompt; for a tokenizer that drops the space before the first word (Metaspace) the answer
then begins without one. Knows nothing of prompts, schedulers or clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

# what decoders put in place of bytes that are not, or not yet, a character
REPLACEMENT = "\ufffd"
# a UTF-8 character has at most four bytes, and a token that is part of one has at least one of them
MAX_TOKENS_PER_CHARACTER = 4
MAX_WINDOW = 8


class TextTokenizer(Protocol):
    """The part of a tokenizer that turns tokens into text.

    decode must not rewrite earlier text when a token is appended (no clean-up of spaces), but for the end of a
    character that was incomplete.
    special_token_ids: exactly the tokens that decode leaves out with skip_special_tokens.
    """

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class IncrementalText:
    """The text of one sequence, released as its tokens come.

    stop_hit: the stop string that ended the text, once one did; of several the one that was complete first, and of
    those that end together the longest. It may also come from `finish`, when the last character was never completed.
    """

    def __init__(
        self, tokenizer: TextTokenizer, stop: Sequence[str], skip_special_tokens: bool, min_tokens: int = 0
    ) -> None:
        """min_tokens: a stop string that is complete before so many tokens are out is ordinary text."""
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._characters = _CharacterStream(lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        self._stops = _StopStrings(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stop_hit(self) -> str | None:
        return self._stops.hit

    def push(self, token_id: int) -> str:
        """The text that may be shown now that this token is out, often none; always none after a stop string."""
        self._num_tokens += 1
        if self.stop_hit is not None or token_id in self._skipped:
            return ""
        return self._stops.push(self._characters.push(token_id), can_stop=self._num_tokens >= self._min_tokens)

    def finish(self) -> str:
        """What was held back, at the end of the sequence: beginnings of stop strings and of characters (as U+FFFD)."""
        if self.stop_hit is not None:
            return ""
        text = self._stops.push(self._characters.finish(), can_stop=self._num_tokens >= self._min_tokens)
        return text + self._stops.finish()


class _CharacterStream:
    """Decodes a window of the last tokens, so that the cost of one does not grow with the text before it.

        | context: text complete and passed on | pending: ends within a character |
        |<---------------------------- window ----------------------------------->|
        |<------------------- passed on ------------------->|<---- held back ---->|    of the window's text

    Some context is always kept, since decoders treat the very first token in its own way. When a decoder with byte
    fallback takes back good characters because bad bytes follow them in a run, those that were passed on stay.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0
        self._passed_on = ""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if self._num_context and not text.startswith(self._passed_on):
            # byte fallback: an incomplete character made the whole run of bytes before it unreadable
            self._restart(self._window[self._num_context :], "")
            text = self._decode(self._window)
        complete = text.rstrip(REPLACEMENT)
        released = complete[len(self._passed_on) :]
        if complete == text:
            self._settle(text)
            return released
        self._passed_on += released
        return released + self._pass_on_bad_bytes(text)

    def finish(self) -> str:
        """The rest of the text, as it stands."""
        text = self._decode(self._window)[len(self._passed_on) :]
        self._restart([], "")
        return text

    def _settle(self, text: str) -> None:
        """No character is open: the window becomes context, and the older part of it goes when it is long."""
        if text and text == self._passed_on:
            # a token without text behind others says nothing about later ones
            self._window.pop()
            return
        self._passed_on = text
        if len(self._window) > MAX_WINDOW and self._num_context:
            del self._window[: self._num_context]
            self._passed_on = self._decode(self._window)
        self._num_context = len(self._window)

    def _pass_on_bad_bytes(self, text: str) -> str:
        """Bounds what is pending: more tokens than a character has bytes are not all the beginning of one.

        They are cut where the two parts decode to what they do together; within a character they would not.
        """
        pending = self._window[self._num_context :]
        if len(pending) <= MAX_TOKENS_PER_CHARACTER:
            return ""
        together = self._decode(pending)
        for cut in range(len(pending) - 1, 0, -1):
            tail = self._decode(pending[cut:])
            if self._decode(pending[:cut]) + tail == together:
                end = len(text) - len(tail)
                released = text[len(self._passed_on) : end]
                self._restart(pending[cut:], self._passed_on[end:])
                return released
        return ""

    def _restart(self, window: list[int], passed_on: str) -> None:
        self._window = window
        self._num_context = 0
        self._passed_on = passed_on


class _StopStrings:
    """Finds the first stop string in text that comes in pieces, and holds back what may become one.

    Held is the longest end of the text that begins a stop string. Only that and the new piece are ever searched, and
    each character is tried once as a beginning before it is released for good, however long the stop strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._by_first: dict[str, list[str]] = {}
        for stop in stops:
            self._by_first.setdefault(stop[0], []).append(stop)
        self._held = ""
        self.hit: str | None = None

    def push(self, piece: str, can_stop: bool) -> str:
        """The text that is released: none of it belongs to a stop string, now or later (unless can_stop was false)."""
        if not piece or not self._stops:
            return piece
        text = self._held + piece
        end = self._find(text, len(self._held)) if can_stop else None
        if end is not None:
            self._held = ""
            return text[:end]
        end = self._held_from(text)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, num_old: int) -> int | None:
        """Where the stop string begins that is the first to end beyond the num_old characters seen before."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, self.hit = min(found)
        return start

    def _held_from(self, text: str) -> int:
        """Where the longest end of the text starts that is the beginning of a stop string, but not all of it."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            candidates = self._by_first.get(text[start])
            if candidates:
                end = text[start:]
                if any(len(end) < len(stop) and stop.startswith(end) for stop in candidates):
                    return start
        return len(text)
