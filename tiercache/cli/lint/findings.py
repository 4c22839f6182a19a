"""What lint found, and how it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tiercache.cli.lint.prompts import LintedPrompt
from tiercache.cli.report import printable

LEAST_SHARE = 0.1
"""Of a prompt: what costs less is not told."""
LEAST_CHARS = 64
"""About a block of 16 tokens: less could not be reused anyway."""
SHORT_CHARS = 2 * LEAST_CHARS
"""A prompt that is shorter cannot be judged: hardly anything in it can cost as much as is told."""
_MOST_SHOWN = 48


@dataclass(frozen=True)
class LintFinding:
    """A place from which on a prompt cannot be reused.

    Attributes:
        kind: a word for programs.
        prompt: where it was found, or costs most.
        position: the first character that changes.
        lost_chars: of what comes after it, how many could be reused otherwise.
        what: what is wrong there, for people.
        remedy: what to do.
        other: the prompt that it was compared with, if it was.
        prompts: how many prompts have it.
    """

    kind: str
    prompt: LintedPrompt
    position: int
    lost_chars: int
    what: str
    remedy: str
    other: str = ""
    prompts: int = 1

    @property
    def cause(self) -> tuple[str, str, str]:
        """The same for prompts that one change would fix."""
        return self.kind, self.prompt.part_at(self.position).name, self.what if self.kind == "tools" else ""

    @property
    def share(self) -> float:
        """What it costs, as a part of the prompt."""
        return self.lost_chars / len(self.prompt.text)

    def having(self, prompts: int) -> LintFinding:
        """The same, of that many prompts."""
        return replace(self, prompts=prompts)


def costly(lost_chars: int, prompt: LintedPrompt) -> bool:
    """True if that much is worth a word."""
    return lost_chars >= max(LEAST_CHARS, LEAST_SHARE * len(prompt.text))


def shown(text: str) -> str:
    """A text as one short line in quotes."""
    line = printable(" ".join(text.split()))
    return f"'{line}'" if len(line) <= _MOST_SHOWN else f"'{line[: _MOST_SHOWN - 3]}...'"


class Ruler:
    """Counts in characters, or in tokens of a model and blocks of an engine."""

    def __init__(self, tokenise: Callable[[str], list[int]] | None = None, block_size: int = 16) -> None:
        self._tokenise = tokenise
        self._block_size = block_size
        self.unit = "characters" if tokenise is None else "tokens"

    def count(self, text: str) -> int:
        """The length of a text."""
        return len(text) if self._tokenise is None else len(self._tokenise(text))

    def tree(self, finding: LintFinding) -> dict[str, Any]:
        """A finding with raw numbers."""
        prompt, at = finding.prompt, finding.position
        part, total = prompt.part_at(at), self.count(prompt.text)
        place: dict[str, Any] = {"position": self.count(prompt.text[:at])}
        if self._tokenise is not None:
            place["block"] = place["position"] // self._block_size
        return {
            "kind": finding.kind,
            "prompt": prompt.source,
            "other": finding.other or None,
            "part": part.name or None,
            "unit": self.unit,
            **place,
            "lost": self.count(prompt.text[at : at + finding.lost_chars]) if finding.lost_chars else 0,
            "total": total,
            "what": finding.what,
            "remedy": finding.remedy,
            "prompts": finding.prompts,
        }

    def line(self, finding: LintFinding) -> str:
        """A finding in words."""
        tree = self.tree(finding)
        part = f"{tree['part']}, " if tree["part"] else ""
        block = f" (block {tree['block']:,})" if "block" in tree else ""
        share = min(1.0, tree["lost"] / max(1, tree["total"]))
        others = finding.prompts - 1
        have = "prompt has" if others == 1 else "prompts have"
        more = f" ({others:,} more {have} this)" if others else ""
        return printable(
            f"{tree['prompt']}: {part}{self.unit[:-1]} {tree['position']:,}{block}: {finding.what}: "
            f"{tree['lost']:,} of {tree['total']:,} {self.unit} ({share:.0%}) cannot be reused; {finding.remedy}{more}"
        )
