"""Streaming detokenization: emits whole characters only, and no part of a stop string.

A token is not a piece of text: a character may take several tokens, and some decoders write a space only between two
words. So new tokens are decoded together with some before them, and the additional text is new (as in Hugging Face's
text-generation-inference).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

# Decoders write this for bytes that are not a character, or not yet.
_NOT_YET = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes and a token at least one, so after as many tokens it will never be a character.
_MAX_PENDING = 8
# Tokens of the prompt that decide how the first new token is written.
_CONTEXT = 6


class Detokenizer:
    """Text of one sequence, token by token. `tokenizer` is one of transformers'.

    A token costs two decodings of a few tokens. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt[-_CONTEXT:])
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that `token` completes, often none."""
        self._pending.append(token)
        text, before = self._decode(self._context + self._pending), self._decode(self._context)
        incomplete = text.endswith(_NOT_YET) or len(text) <= len(before)
        if incomplete and len(self._pending) < _MAX_PENDING:
            return ""
        if len(text) > len(before):  # else they have no text (special tokens) and serve as no context
            self._context = self._pending
        self._pending = []
        return text[len(before) :]

    def flush(self) -> str:
        """The rest, after the last token."""
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


class Cut(NamedTuple):
    """Text that may be shown now, and whether a stop string came behind it."""

    text: str
    stopped: bool


class StopStrings:
    """Passes text up to the first stop string; holds back text that may become one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = stops
        self._kept = ""

    def add(self, text: str) -> Cut:
        """Add new text. Do not call it after `stopped`."""
        self._kept += text
        starts = [start for stop in self._stops if (start := self._kept.find(stop)) >= 0]
        if starts:
            return Cut(self._kept[: min(starts)], stopped=True)
        keep = max((_overlap(self._kept, stop) for stop in self._stops), default=0)
        shown = len(self._kept) - keep
        shown_text, self._kept = self._kept[:shown], self._kept[shown:]
        return Cut(shown_text, stopped=False)

    def flush(self) -> str:
        """The text held back, after the last text."""
        kept, self._kept = self._kept, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
