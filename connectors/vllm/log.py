"""What vLLM's log and metrics say about the cache: that it is connected, what requests get from it, counters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tiercache.connector.connector import Connector
from tiercache.errors import TierCacheError
from tiercache.ground.units import format_bytes, format_duration

from .compat import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine
from .costs import TIER_NAMES, TierBlocks

MOST_LINES = 20
"""Lines that may follow each other closely; then one every LINE_EVERY_S, and those left out are counted."""
LINE_EVERY_S = 0.5
COUNTERS = ("loaded_blocks", "loaded_bytes", "loads_short", "stored_blocks", "stored_bytes", "dropped_blocks")
"""Counters of a rank."""
DECLINED = "declined_blocks"
"""The counter of blocks that were found but computed all the same."""

logger = logging.getLogger("tiercache.connectors.vllm")


def introduce(connector: Connector, ranks: int) -> bool:
    """Log which cache this is. Blocks for one request; returns whether there is one."""
    try:
        stats = connector.client.stats()
    except TierCacheError:
        return False
    daemon, tiers = stats["daemon"], stats["tiers"]
    capacity = {name: tier["capacity_bytes"] for name, tier in tiers.items() if name != "shared"}
    if not stats["health"].get("parts", {}).get("arena"):  # a daemon that has just started has less as yet
        capacity["dram"] = stats["arena"]["bytes"]
    sizes = [f"{name.upper()} {format_bytes(size)}" for name, size in capacity.items()]
    if directories := tiers.get("nvme", {}).get("directories"):
        sizes[-1] += f" in {len(directories)} director{'y' if len(directories) == 1 else 'ies'}"
    if shared := tiers.get("shared"):
        sizes.append(f"the shared store {shared['store']}")
    stored, spec = sum(tiers[name]["bytes"] for name in capacity), connector.namespace
    logger.info(
        "connected to the cache at %s (daemon %s, pid %s): %s, of which %s hold blocks; "
        "%d tokens and %s of each of %d rank(s) in a block",
        connector.client.address,
        daemon["version"],
        daemon["pid"],
        ", ".join(sizes),
        format_bytes(stored),
        spec.block_size,
        format_bytes(spec.block_bytes),
        ranks,
    )
    return True


class RequestLog:
    """A line for each request that the cache has served, as long as there are few of them.

    Args:
        how: `auto` leaves lines out and counts them when there are many requests; `all` does not; `off`.
        clock: in seconds.
    """

    def __init__(self, how: str = "auto", clock: Callable[[], float] = time.monotonic) -> None:
        self._how = how
        self._clock = clock
        self._room = float(MOST_LINES)
        self._last_s = clock()
        self._left_out = self._left_out_tokens = 0

    def served(self, request_id: str, loaded: TierBlocks, of_tokens: int, local_tokens: int, seconds: float) -> None:
        """Count the tokens that a request had loaded from each tier, after those that vLLM had itself."""
        if self._how == "off":
            return
        tokens = sum(loaded)
        if not self._may():
            self._left_out += 1
            self._left_out_tokens += tokens
            return
        others = ""
        if self._left_out:
            others = f"; {self._left_out} requests before it got {self._left_out_tokens:,} tokens"
            self._left_out = self._left_out_tokens = 0
        logger.info(
            "%s: %s of %s prompt tokens from the cache (%s) in %s, %s from vLLM's own%s",
            request_id,
            f"{tokens:,}",
            f"{of_tokens:,}",
            ", ".join(f"{TIER_NAMES[tier]} {count:,}" for tier, count in enumerate(loaded) if count or tier < 2),
            format_duration(seconds),
            f"{local_tokens:,}",
            others,
        )

    def failed(self, request_ids: set[str]) -> None:
        """Part of what these requests were to load did not arrive: it is computed."""
        if self._how != "off" and self._may():
            logger.info(
                "%s: not all came that was to come from the cache; it is computed", ", ".join(sorted(request_ids))
            )

    def missed(self, request_id: str, of_tokens: int) -> None:
        """The cache had nothing more for a request."""
        if self._how != "off":
            logger.debug("%s: nothing in the cache for %d prompt tokens", request_id, of_tokens)

    def _may(self) -> bool:
        """True if there is room for a line."""
        now_s = self._clock()
        self._room = min(MOST_LINES, self._room + (now_s - self._last_s) / LINE_EVERY_S)
        self._last_s = now_s
        if self._how == "auto" and self._room < 1:
            return False
        self._room -= 1
        return True


# --- metrics -----------------------------------------------------------------------------------------

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
