"""What a host with four fast drives would get, by the figures of one drive here.

    python bench/bench_nvme.py --workers both 2m 512k 128k | tail -n 1 | python bench/four_drives.py

Reads the JSON object of `bench_nvme.py`, prints the tables of FOUR_DRIVES.md, which explains the arithmetic. The
figures are those with worker processes (`_workers`); `--suffix` names those of another carrier. A figure that is
missing leaves out its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

DRIVES, DRIVE_GB_S = 4, 7.0
CORES = 64
MEMORY_GB_S = 300.0
"""Eight channels of DDR5-4800."""
MEMORY_PASSES = 4
"""Times that a byte crosses the memory bus: the drive's DMA, the checksum's reading, the client's copy out and in."""
SIZES = {"128k": 128 << 10, "512k": 512 << 10, "2m": 2 << 20}
STEPS = ("write", "read")


class Costs(NamedTuple):
    """Costs of one block size, one way; None: not measured. CPU seconds a GB, but for the loop's."""

    block_bytes: int
    loop_us_per_block: float | None
    own_cpu_s_per_gb: float | None
    worker_cpu_s_per_gb: float | None
    cpu_s_per_gb: float | None
    """Of daemon, workers and client besides its copy."""

    @classmethod
    def of(cls, figures: Mapping[str, Any], step: str, size: str, suffix: str) -> Costs:
        """From the JSON of `bench_nvme.py`."""
        names = ("loop_us_per_block", "own_cpu_s_per_gb", "worker_cpu_s_per_gb", "cpu_s_per_gb")
        return cls(SIZES[size], *(figures.get(f"{name}_{step}_{size}{suffix}") for name in names))

    @property
    def measured(self) -> bool:
        return any(cost is not None for cost in self[1:])

    def limits_gb_s(self) -> dict[str, float]:
        """What each part allows the host, in GB/s; those that are not known are left out."""
        found = {"drives": DRIVES * DRIVE_GB_S, "memory": MEMORY_GB_S / MEMORY_PASSES}
        if self.loop_us_per_block:
            found["loop"] = self.block_bytes / self.loop_us_per_block / 1000
        if self.own_cpu_s_per_gb:
            found["daemon"] = 1 / self.own_cpu_s_per_gb
        if self.worker_cpu_s_per_gb:
            found["workers"] = DRIVES / self.worker_cpu_s_per_gb
        if self.cpu_s_per_gb:
            found["cores"] = CORES / self.cpu_s_per_gb
        return found


def binding(limits_gb_s: Mapping[str, float]) -> tuple[str, float]:
    """The lowest limit: its name, and GB/s."""
    name = min(limits_gb_s, key=lambda its: limits_gb_s[its])
    return name, limits_gb_s[name]


def tables(figures: Mapping[str, Any], suffix: str) -> Iterator[str]:
    """The lines of both tables, in Markdown: costs, and what follows from them."""
    rows = {(size, step): Costs.of(figures, step, size, suffix) for size in SIZES for step in STEPS}
    rows = {row: costs for row, costs in rows.items() if costs.measured}
    yield "| block | | loop, µs a block | daemon, CPU s/GB | worker, CPU s/GB | all, CPU s/GB |"
    yield "|---|---|---|---|---|---|"
    for (size, step), costs in rows.items():
        cells = ("–" if cost is None else f"{cost:.3g}" for cost in costs[1:])
        yield f"| {size} | {step} | {' | '.join(cells)} |"
    yield ""
    names = ("drives", "memory", "loop", "daemon", "workers", "cores")
    yield f"| block | | {' | '.join(names)} | so at most | bound by |"
    yield f"|---|---|{'---|' * len(names)}---|---|"
    for (size, step), costs in rows.items():
        limits = costs.limits_gb_s()
        name, gb_s = binding(limits)
        cells = (f"{limits[its]:.1f}" if its in limits else "–" for its in names)
        yield f"| {size} | {step} | {' | '.join(cells)} | **{gb_s:.1f} GB/s** | {name} |"


def main() -> None:
    """Print the tables of the object on standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suffix", default="_workers", help="end of the keys: the carrier (default: %(default)s)")
    options = parser.parse_args()
    lines = list(tables(json.loads(sys.stdin.read().splitlines()[-1]), options.suffix))
    if len(lines) <= 5:
        sys.exit(f"no figures that end with {options.suffix!r}: run bench_nvme.py with --workers on or both")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
