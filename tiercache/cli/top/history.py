"""The memory of `tiercache top`: the last reading, hit rates over time, recent work of clients and namespaces."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiercache.cli.readings import Change, Reading, at

MAX_POINTS = 240
MAX_READINGS = 10
"""Seconds for rates of clients and namespaces: clients report their counters only every 5 s."""
_BARS = "▁▂▃▄▅▆▇█"


class IntervalHits(NamedTuple):
    """Tokens asked for in an interval, and those found in each tier."""

    asked: float
    dram: float
    nvme: float
    shared: float = 0.0

    def share(self, tier: str) -> float | None:
        """Share of the tokens asked for that were found in a tier, by its name; None if none were asked for."""
        return float(getattr(self, tier)) / self.asked if self.asked else None


@dataclass
class RecentReadings:
    """Collects readings in order. `last` is the last good one; `problem` is why there is none now."""

    last: Reading | None = None
    change: Change | None = None
    problem: str = ""
    restarts: int = 0
    points: deque[IntervalHits] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    _readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=MAX_READINGS))

    def take(self, reading: Reading) -> None:
        """Add a reading."""
        if reading.problem:
            self.problem = reading.problem
            return
        self.problem = ""
        if self.last is not None:
            self.change = Change(self.last, reading)
            self.restarts += self.change.restarted
            asked, dram, below, shared = (
                self.change.grown(f"traffic.{name}_tokens") for name in ("asked", "dram_hit", "below_hit", "shared_hit")
            )
            self.points.append(IntervalHits(asked, dram, below - shared, shared))
            self._readings.append(self.last)
        self.last = reading

    def rates(
        self, section: str, keys: tuple[str, ...], names: tuple[str, ...], least_s: float = 0.0
    ) -> list[dict[str, float] | None]:
        """For each row of a list in the tree: growth per second of some of its counters over the last readings.

        None before the first two readings, and before they span `least_s`.

        Rows of two readings belong together if they have the same `keys`, in order.
        """
        rows = [] if self.last is None else self.last.tree.get(section, [])
        last = self.last
        earliest = next((one for one in self._readings if last is not None and one.generation == last.generation), None)
        if last is None or earliest is None or last.time_s - earliest.time_s < least_s:
            return [None] * len(rows)
        seconds = max(1e-6, last.time_s - earliest.time_s)
        before = dict(_named(earliest.tree.get(section, []), keys))
        found: list[dict[str, float] | None] = []
        for name, row in _named(rows, keys):
            earlier = before.get(name, {})
            grown = {path: max(0.0, at(row, path) - at(earlier, path)) for path in names}
            found.append({path: value / seconds for path, value in grown.items()})
        return found


def _named(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Rows by name; those with equal keys (sessions of one process) are numbered."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        name = tuple(row.get(key) for key in keys)
        seen[name] += 1
        yield (*name, seen[name]), row


def sparkline(values: list[float | None], width: int) -> str:
    """The last `width` shares, 0 to 1, as bars, the newest on the right; a dot for a missing one."""
    shown = values[-width:] if width > 0 else []
    bars = ["·" if value is None else _BARS[min(7, int(value * 8))] for value in shown]
    return "".join(bars).rjust(max(0, width))
