"""What a check of a directory reports: findings and notes, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tiercache.daemon.tiers.nvme.catalog.rows import segment_and_slot
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES

MAX_NAMED = 20
"""Findings of one kind that are named; the rest are counted."""


@dataclass(slots=True)
class Report:
    """The result for one directory."""

    path: Path
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: int = 0
    scanned_blocks: int = 0
    scanned_bytes: int = 0
    deleted_rows: int = 0
    """Rows deleted by a repair."""


class Findings:
    """Findings by kind, the first ones of each by name."""

    def __init__(self) -> None:
        self._named: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, kind: str, text: str) -> None:
        """Record one finding."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        named = self._named.setdefault(kind, [])
        if len(named) < MAX_NAMED:
            named.append(text)

    def lines(self) -> list[str]:
        """All findings, in the order in which their kinds were first seen."""
        found = []
        for kind, texts in self._named.items():
            found += texts
            more = self._counts[kind] - len(texts)
            if more:
                found.append(f"{kind}: {more:,} more")
        return found


def where(place: int) -> str:
    """A place, as findings name it."""
    segment, slot = segment_and_slot(place)
    return f"segment {segment} offset {slot * PAGE_BYTES}"
