"""What a metric is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tiercache.http.readings import Samples, Steps, Tree

PREFIX = "tiercache_"


class Family(NamedTuple):
    """One metric. `samples` reads it from a tree of stats with histograms; empty if the daemon has no such figure."""

    kind: str
    name: str
    labels: tuple[str, ...]
    text: str
    samples: Callable[[Tree], Samples]
    steps: Steps = Steps((), 1)

    @property
    def full_name(self) -> str:
        """The exported name: metrics of the process have the names that all programs use."""
        return self.name if self.name.startswith("process_") else PREFIX + self.name
