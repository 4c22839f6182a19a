"""Texts that look as if they were new in every request: times, and ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_DATE = r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_LONG_DATE = rf"(?:{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d{{1,2}}\.? {_MONTH},? \d{{4}})"
_TIME = r"\d{1,2}:\d{2}(?::\d{2})?(?:[.,]\d+)?"
_NOW = r"\b(?:today|now|current(?:ly)?|date|time|timestamp|as of)\b[^\n]{0,30}?"
_ID = r"\b(?:(?:request|req|session|trace|span|conversation|correlation|run|thread|message)[ _-]?id|nonce|uuid|guid)"


class Kind(NamedTuple):
    """One sort of such a text. `text` is the group of the pattern that changes."""

    name: str
    what: str
    remedy: str
    pattern: re.Pattern[str]


_LATER = "put it behind everything that stays the same"
_KINDS = (
    Kind(
        "time",
        "a time",
        f"{_LATER}, or give the date only",
        re.compile(rf"\b(?P<text>(?:{_DATE}|{_LONG_DATE})(?:[T ]|, | at ){_TIME}\S*)"),
    ),
    Kind("time", "a time", f"{_LATER}, or give the date only", re.compile(rf"(?i:{_NOW})(?P<text>{_TIME})")),
    Kind(
        "time", "an epoch time", _LATER, re.compile(rf"(?i:{_NOW}|\bts\b\W{{0,4}})(?P<text>\b1\d{{9}}(?:\d{{3}})?\b)")
    ),
    Kind("date", "a date", _LATER, re.compile(rf"(?i:{_NOW})(?P<text>{_DATE}|{_LONG_DATE})")),
    Kind(
        "id",
        "an id",
        f"leave it out, or {_LATER}",
        re.compile(r"\b(?P<text>[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})\b"),
    ),
    Kind(
        "id",
        "an id",
        f"leave it out, or {_LATER}",
        # An id has a digit soon: looking for one to the end of a text would take hours where many begin and none comes.
        re.compile(rf"(?i:{_ID})\W{{1,4}}(?P<text>\b(?=[\w-]{{0,63}}\d)[\w-]{{8,}}\b)"),
    ),
    Kind(
        "id",
        "an id",
        f"leave it out, or {_LATER}",
        re.compile(r"\b(?P<text>(?:req|chatcmpl|cmpl|sess|call|run|trace)[_-](?=\w*\d)\w{8,})\b"),
    ),
)


class Changing(NamedTuple):
    """Such a text in a prompt, at characters `start ..< end`."""

    kind: Kind
    start: int
    end: int


def changing_texts(text: str) -> list[Changing]:
    """All of them, by place; of those that overlap the first."""
    found = sorted(_found(text), key=lambda one: (one.start, -one.end))
    kept: list[Changing] = []
    for one in found:
        if not kept or one.start >= kept[-1].end:
            kept.append(one)
    return kept


def _found(text: str) -> Iterator[Changing]:
    for kind in _KINDS:
        for match in kind.pattern.finditer(text):
            yield Changing(kind, *match.span("text"))
