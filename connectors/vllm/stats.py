"""Counts of what the connector moved, for vLLM's own log lines and its Prometheus page."""

from __future__ import annotations

from typing import Any

from .compat import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine
from .scheduler import DECLINED
from .worker import COUNTERS

ALL_COUNTERS = (*COUNTERS, DECLINED)


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of an interval by name: `data` is a dict of ALL_COUNTERS."""

    data: dict[str, int]

    def reset(self) -> None:
        """Begin a new interval."""
        self.data = {}

    def aggregate(self, other: ConnectorStats) -> ConnectorStats:
        """This and another rank's or interval's counts as one."""
        names = self.data.keys() | other.data.keys()
        return ConnectorStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        """For a log line."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """True if nothing was moved."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter for each of ALL_COUNTERS, called `vllm:tiercache_<name>`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        labels = args[2]
        self._metrics = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:tiercache_{name}",
                    documentation=f"{name.replace('_', ' ')}, as tiercache's connector counts them.",
                    labelnames=labels,
                ),
                self.per_engine_labelvalues,
            )
            for name in ALL_COUNTERS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, count in transfer_stats_data.items():
            self._metrics[name][engine_idx].inc(count)
