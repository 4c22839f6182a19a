"""The daemon's estimate for caches of other sizes (`what_if` in its statistics), as a table and a sentence."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from tiercache.cli.report import Section
from tiercache.ground.units import format_bytes, format_duration


class CurvePoint(NamedTuple):
    """A cache size, its composition, and the share of looked-up blocks that it would have had."""

    size_bytes: int
    label: str
    hit_rate: float


def points(tree: dict[str, Any]) -> list[CurvePoint]:
    """The curve with names for its sizes; empty if there is none (yet)."""
    dram_bytes = int(tree.get("arena", {}).get("bytes", 0))
    curve = tree.get("what_if", {}).get("curve", [])
    below_bytes = int(tree.get("tiers", {}).get("nvme", {}).get("capacity_bytes", 0))
    if not dram_bytes:
        return []
    return [
        CurvePoint(
            int(one["capacity_bytes"]), _label(int(one["capacity_bytes"]), dram_bytes, below_bytes), one["hit_rate"]
        )
        for one in curve
    ]


def _label(size_bytes: int, dram_bytes: int, below_bytes: int) -> str:
    for times in (Fraction(1, 2), Fraction(1), Fraction(2)):
        if below_bytes and abs(size_bytes - dram_bytes - below_bytes * times) < 1:
            return "DRAM + NVMe" if times == 1 else f"DRAM + {times} NVMe"
    times = Fraction(size_bytes, dram_bytes).limit_denominator(8)
    return "DRAM" if times == 1 else f"{times} DRAM"


def sentence(tree: dict[str, Any]) -> str:
    """The gain from more memory, in one line."""
    what_if = tree.get("what_if")
    if not what_if:
        return "off (--what-if no)"
    by_label = {point.label: point for point in points(tree)}
    if "DRAM" not in by_label or "2 DRAM" not in by_label:
        return "not enough has been looked up yet to say what more memory would bring"
    now, twice = by_label["DRAM"], by_label["2 DRAM"]
    text = f"twice the DRAM ({format_bytes(twice.size_bytes)}) would have had {twice.hit_rate:.1%} of the blocks"
    text += f" looked up in the last {format_duration(what_if['window_s'])}, and this much {now.hit_rate:.1%}"
    if "DRAM + NVMe" in by_label and "DRAM + 2 NVMe" in by_label:
        both, more = by_label["DRAM + NVMe"], by_label["DRAM + 2 NVMe"]
        text += f"; with the NVMe {both.hit_rate:.1%}, with twice the NVMe {more.hit_rate:.1%}"
    return text


def table(tree: dict[str, Any]) -> list[Section]:
    """The curve as a section; no section without a curve."""
    rows = [(format_bytes(point.size_bytes), point.label, f"{point.hit_rate:.1%}") for point in points(tree)]
    columns = ("capacity", "as large as", "hit rate")
    return [Section("what if (LRU caches of other sizes)", columns, rows)] if rows else []
