"""Compares prompts that are otherwise alike: the first difference, and what is the same again behind it.

A cache of prefixes reuses a prompt up to its first difference from every earlier one. What is the same behind that is
lost: runs of SHINGLE words that an earlier prompt has too.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cached_property

from tiercache.cli.lint.causes import explain
from tiercache.cli.lint.changing import changing_texts
from tiercache.cli.lint.findings import LintFinding, costly, shown
from tiercache.cli.lint.prompts import LintedPrompt

EARLIER = 8
"""Prompts before it that each is compared with."""
SHINGLE = 8
FRONT_CHARS = 2000
"""Times and ids in these, or in the first quarter of a prompt, are told of a single prompt: later ones may belong to
what a document says."""
_MOST_WORDS = 400
"""Behind a difference, among which its end is looked for."""
_AGAIN = 6
"""Words in a row that end a difference."""
_WORD = re.compile(r"[A-Za-z0-9_]+|[^\sA-Za-z0-9_]")


class _Words:
    """A prompt with its words, for comparisons."""

    def __init__(self, prompt: LintedPrompt) -> None:
        self.prompt = prompt
        self.text = prompt.text

    @cached_property
    def starts(self) -> list[int]:
        """Where each word begins."""
        return [match.start() for match in _WORD.finditer(self.text)]

    @cached_property
    def shingles(self) -> list[int]:
        """A hash of each run of words."""
        hashes = [hash(word) for word in _WORD.findall(self.text)]
        return [hash(tuple(hashes[at : at + SHINGLE])) for at in range(len(hashes) - SHINGLE + 1)]

    @cached_property
    def last_at(self) -> dict[int, int]:
        """Where each such run begins last."""
        return dict(zip(self.shingles, self.starts, strict=False))

    def also_in(self, other: _Words, position: int, other_position: int) -> int:
        """Characters behind `position` that `other` has too, behind its own."""
        found, covered, starts, last_at = 0, 0, self.starts, other.last_at
        begin = bisect_left(starts, position)
        for number, shingle in enumerate(self.shingles[begin:], begin):
            if last_at.get(shingle, -1) >= other_position:
                first = max(covered, number)
                covered = number + SHINGLE
                found += (starts[covered] if covered < len(starts) else len(self.text)) - starts[first]
        return found


def lint(prompts: Sequence[LintedPrompt]) -> list[LintFinding]:
    """All that is worth a word, each cause once: in pairs of prompts, then in single ones."""
    words = [_Words(prompt) for prompt in prompts]
    reused = [0] * len(words)  # how far each is as another one near it
    found: list[LintFinding] = []
    for number, one in enumerate(words):
        near = range(max(0, number - EARLIER), number)
        same = {other: common_prefix(one.text, words[other].text) for other in near}
        for other, length in same.items():
            reused[other] = max(reused[other], length)
            reused[number] = max(reused[number], length)
        if finding := _against(one, {words[other]: length for other, length in same.items()}):
            found.append(finding)
        if number >= EARLIER:
            words[number - EARLIER] = _Words(prompts[number - EARLIER])  # its shingles are not needed any more
    for prompt, length in zip(prompts, reused, strict=True):
        found += _alone(prompt, length)
    return _by_cause(found)


def common_prefix(first: str, second: str) -> int:
    """How many leading characters are the same."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low + 1 < high:  # the first `low` are the same, the first `high` are not
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _against(one: _Words, earlier: dict[_Words, int]) -> LintFinding | None:
    """What keeps a prompt from being reused more than it is, given those before it."""
    reused = max(earlier.values(), default=0)
    lost = {other: one.also_in(other, reused, length) for other, length in earlier.items()}
    other = max(lost, key=lambda words: lost[words], default=None)
    if other is None or not costly(lost[other], one.prompt):
        return None
    end, other_end = difference(one.text, other.text, earlier[other])
    return explain(one.prompt, other.prompt, earlier[other], end, other_end, lost[other])


def difference(text: str, other: str, start: int) -> tuple[int, int]:
    """Where a difference that begins at `start` ends in both texts."""
    while start and (text[start - 1].isalnum() or text[start - 1] == "_"):
        start -= 1
    mine, theirs = (list(_first_words(one, start)) for one in (text, other))
    matcher = SequenceMatcher(None, [word for word, _ in mine], [word for word, _ in theirs], autojunk=False)
    for block in matcher.get_matching_blocks():
        if block.size >= _AGAIN:
            return mine[block.a][1], theirs[block.b][1]
    return len(text), len(other)


def _first_words(text: str, start: int) -> list[tuple[str, int]]:
    found = []
    for match in _WORD.finditer(text, start):
        found.append((match.group(), match.start()))
        if len(found) == _MOST_WORDS:
            break
    return found


def _alone(prompt: LintedPrompt, reused: int) -> list[LintFinding]:
    """Times and ids at the front of one prompt, if no other prompt has the same there."""
    found = []
    front = max(FRONT_CHARS, len(prompt.text) // 4)
    for one in changing_texts(prompt.text[: 2 * front]):
        at_front = one.start <= front and (prompt.part_at(one.start).stable or not prompt.new_chars)
        lost = len(prompt.text) - one.end - prompt.new_chars
        if at_front and one.end > reused and costly(lost, prompt):
            what = f"{one.kind.what} that looks new in each request, {shown(prompt.text[one.start : one.end])}"
            found.append(LintFinding(one.kind.name, prompt, one.start, lost, what, one.kind.remedy))
    return found


def _by_cause(found: list[LintFinding]) -> list[LintFinding]:
    """One finding for each cause, where it costs most, with how many prompts have it. Pairs come before single ones."""
    sources: dict[tuple[str, str, str], set[int]] = {}
    worst: dict[tuple[str, str, str], LintFinding] = {}
    for one in found:
        known = worst.setdefault(one.cause, one)
        if one.share > known.share and bool(one.other) == bool(known.other):
            worst[one.cause] = one
        sources.setdefault(one.cause, set()).add(id(one.prompt))
    return [one.having(len(sources[cause])) for cause, one in worst.items()]
