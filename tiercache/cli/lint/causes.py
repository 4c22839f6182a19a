"""Why two prompts part although most of what follows is the same: tools, JSON, the order of documents, a time, ..."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from tiercache.cli.lint.changing import Changing, changing_texts
from tiercache.cli.lint.findings import LintFinding, shown
from tiercache.cli.lint.prompts import LintedPrompt

MAX_JSON_CHARS = 256 << 10
MAX_BRACKETS = 32
"""Beginnings of JSON before a difference that are tried."""
_BLANK_LINE, _LINE = re.compile(r"\n\s*\n"), re.compile(r"\n")
_LEAST_PARAGRAPH = 16
_AROUND = 60
"""Characters around a difference that show what it is."""
_BEHIND = 20
"""Characters that may differ behind a time or an id for it to be the cause."""
_NUMBERED = re.compile(r"^\W*(?:document|doc|source|passage|chunk|result|context)?\W*\d+\W+", re.IGNORECASE)


class Cause(NamedTuple):
    """Why prompts part: a word for programs, what it is, and what to do."""

    kind: str
    what: str
    remedy: str


def explain(one: LintedPrompt, other: LintedPrompt, at: int, end: int, other_end: int, lost: int) -> LintFinding:
    """The finding about two prompts that differ at `at ..< end`, which is `at ..< other_end` in the other one."""
    seen = _seen(one, at, end)
    cause = (
        _tools(one, other, at)
        or (_text(one, other, at, end, other_end) if seen is not None and end <= seen.end + _BEHIND else None)
        or _json(one, other, at)
        or _order(one, other, at)
        or _text(one, other, at, end, other_end)
    )
    return LintFinding(cause.kind, one, at, lost, cause.what, cause.remedy, other.source)


def _tools(one: LintedPrompt, other: LintedPrompt, at: int) -> Cause | None:
    if not one.tools or not one.part_at(at).name.startswith("tools"):
        return None
    if one.tools == other.tools:
        same = "the same tools with their keys in another order"
        return Cause("tools", same, "write tools with their keys in one order, such as sorted")
    mine, theirs = (sorted(json.dumps(tool, sort_keys=True) for tool in prompt.tools) for prompt in (one, other))
    if mine != theirs:
        return None
    return Cause("tools", "the same tools in another order", "send tools in one order, such as by name")


def _json(one: LintedPrompt, other: LintedPrompt, at: int) -> Cause | None:
    """If the difference lies within JSON that says the same in both."""
    decoder = json.JSONDecoder()
    begin = max(0, at - MAX_JSON_CHARS)
    brackets = [begin + match.start() for match in re.finditer(r"[\[{]", one.text[begin : at + 1])]
    for start in brackets[-MAX_BRACKETS:]:
        try:
            mine, my_end = decoder.raw_decode(one.text[: start + 2 * MAX_JSON_CHARS], start)
            theirs, their_end = decoder.raw_decode(other.text[: start + 2 * MAX_JSON_CHARS], start)
        except (ValueError, RecursionError):
            continue
        if min(my_end, their_end) <= at:
            continue
        if mine != theirs:
            return None
        if json.dumps(mine) == json.dumps(theirs):
            same = "the same JSON with other whitespace"
            return Cause("whitespace", same, "write JSON in one way, such as json.dumps does")
        return Cause("keys", "the same JSON with its keys in another order", "write JSON with sorted keys")
    return None


def _order(one: LintedPrompt, other: LintedPrompt, at: int) -> Cause | None:
    """If paragraphs behind the difference are the same in another order, or at other places among as many."""
    begin = one.text.rfind("\n", 0, at) + 1
    texts = one.text[begin:], other.text[begin:]
    separator = _BLANK_LINE if all(map(_BLANK_LINE.search, texts)) else _LINE
    mine, theirs = (_paragraphs(text, separator) for text in texts)
    places = [(place, theirs[paragraph]) for paragraph, place in mine.items() if paragraph in theirs]
    in_order = places == sorted(places, key=lambda pair: pair[1])
    if in_order and (len(mine) != len(theirs) or all(place == their_place for place, their_place in places)):
        return None
    what = "the same documents " + ("behind other ones" if in_order else "in another order")
    numbered = any(_NUMBERED.match(part.strip()) for part in separator.split(texts[0]))
    numbers = " and without numbers that change with their place," if numbered else ""
    remedy = f"send them in one order,{numbers} or ask `tiercache affinity --segments` for the order that is stored"
    return Cause("order", what, remedy)


def _paragraphs(text: str, separator: re.Pattern[str]) -> dict[str, int]:
    """The paragraphs of a text, without their numbers, and their places."""
    bare = (_NUMBERED.sub("", paragraph.strip()) for paragraph in separator.split(text))
    return {one: place for place, one in enumerate(dict.fromkeys(one for one in bare if len(one) >= _LEAST_PARAGRAPH))}


def _text(one: LintedPrompt, other: LintedPrompt, at: int, end: int, other_end: int) -> Cause:
    """Any other difference, with what it is if that can be seen."""
    seen = _seen(one, at, end)
    start, more = _word_start(one.text, at), 0
    if seen is not None:  # what differs may be a part of it
        start, more = seen.start, max(0, seen.end - end)
    mine, theirs = one.text[start : end + more].strip(), other.text[start : other_end + more].strip()
    both = f"{shown(mine)} here, {shown(theirs)} in {other.source}"
    part, their_part = one.part_at(at), other.part_at(at)
    only = one.text[end : part.end] == other.text[other_end : their_part.end] and part.name.endswith("(system)")
    if seen is not None:
        lead = f"the system message differs only by {seen.kind.what}" if only else f"{seen.kind.what} differs"
        return Cause(seen.kind.name, f"{lead}, {both}", seen.kind.remedy)
    lead = "the system message differs only by this" if only else "most is the same again after this"
    return Cause("text", f"{lead}, {both}", "put what changes behind what stays the same")


def _seen(prompt: LintedPrompt, at: int, end: int) -> Changing | None:
    """The time or id that lies at the difference."""
    begin = max(0, at - _AROUND)
    for one in changing_texts(prompt.text[begin : min(end, at + _AROUND) + _AROUND]):
        if one.start + begin <= at < one.end + begin:
            return one._replace(start=one.start + begin, end=one.end + begin)
    return None


def _word_start(text: str, at: int) -> int:
    """The beginning of the word at that place."""
    while at and (text[at - 1].isalnum() or text[at - 1] in "-_.:"):
        at -= 1
    return at
