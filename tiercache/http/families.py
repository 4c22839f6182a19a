"""All metrics, in the order in which `/metrics` shows them; `measured/` defines them.

`daemon/MONITORING.md` has the same table, as this module prints it; a test compares them.
"""

from __future__ import annotations

from tiercache.http.measured import clients, counters, shared, state, tiers, traffic
from tiercache.http.measured.family import Family

FAMILIES: tuple[Family, ...] = (
    *state.STATE,
    *traffic.TRAFFIC,
    *tiers.TIERS,
    *tiers.DISKS,
    *shared.SHARED,
    *clients.NAMESPACES,
    *clients.HINTS,
    *state.PROCESS,
    *counters.COUNTED,
)


def table() -> str:
    """The table of metrics, as in the documentation."""
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.full_name}` | {family.kind} | {labels} | {family.text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
