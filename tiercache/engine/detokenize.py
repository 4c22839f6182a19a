"""Streaming detokenization: whole characters only, and nothing of a stop string.

A token is not a piece of text: a character may take several tokens, and some decoders write a space only between two
words. So new tokens are decoded together with some before them, and only the additional text is new (the way of Hugging
Face's text-generation-inference).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

# Decoders write this for bytes that are no character, or none yet.
_NOT_YET = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, and a token at least one; then it will never be one.
_MAX_PENDING = 8
# Tokens of the prompt that decide how the first new one is written.
_CONTEXT = 6


class Detokenizer:
    """Text of one sequence, token by token. `tokenizer` is one of transformers'.

    A token costs two decodings of a few tokens. Bytes that are no UTF-8 come out as U+FFFD.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt[-_CONTEXT:])
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that is complete with `token`, often none."""
        self._pending.append(token)
        text, before = self._decode(self._context + self._pending), self._decode(self._context)
        incomplete = text.endswith(_NOT_YET) or len(text) <= len(before)
        if incomplete and len(self._pending) < _MAX_PENDING:
            return ""
        if len(text) > len(before):  # else they have no text (special tokens) and are no context
            self._context = self._pending
        self._pending = []
        return text[len(before) :]

    def flush(self) -> str:
        """The rest, when no token will come any more."""
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


class Cut(NamedTuple):
    """Text that may be shown now, and whether a stop string came behind it."""

    text: str
    stopped: bool


class StopStrings:
    """Text up to the first of some strings; keeps back what may become one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = stops
        self._kept = ""

    def add(self, text: str) -> Cut:
        """Take in new text. After `stopped` no more is to be added."""
        self._kept += text
        starts = [start for stop in self._stops if (start := self._kept.find(stop)) >= 0]
        if starts:
            return Cut(self._kept[: min(starts)], stopped=True)
        keep = max((_overlap(self._kept, stop) for stop in self._stops), default=0)
        shown = len(self._kept) - keep
        shown_text, self._kept = self._kept[:shown], self._kept[shown:]
        return Cut(shown_text, stopped=False)

    def flush(self) -> str:
        """What was kept back, when no text will come any more."""
        kept, self._kept = self._kept, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
