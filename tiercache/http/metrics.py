"""The daemon's statistics as Prometheus reads them. Names are stable: what is there keeps its name and meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

PREFIX = "tiercache_"
_QUANTILES = ("p50_us", "p90_us", "p99_us")
_TIERS = {
    "blocks": "Blocks in a tier.",
    "bytes": "Bytes of blocks in a tier.",
    "capacity_bytes": "Bytes that fit into a tier.",
}
_TIER_COUNTERS = {
    "written_blocks": "Blocks written to a tier from DRAM.",
    "written_bytes": "Their bytes.",
    "promoted_blocks": "Blocks read from a tier into DRAM.",
    "promoted_bytes": "Their bytes.",
    "direct_blocks": "Blocks that clients read there themselves.",
    "direct_stored_blocks": "Blocks that clients wrote there themselves.",
    "bad_blocks": "Blocks that failed their checksum, and were dropped.",
    "failed_reads": "Reads that a disk failed.",
    "write_failed_blocks": "Blocks that could not be written.",
}


class _Collector(Collector):
    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = tree

    def collect(self) -> Iterable[Metric]:
        tree = self._tree
        yield _gauge("up", "1 when the daemon answers.", float(bool(tree)))
        if not tree:
            return
        daemon, arena = tree["daemon"], tree["arena"]
        yield _labelled("build_info", "The daemon's version.", ["version"], [([daemon["version"]], 1.0)])
        yield _gauge("uptime_seconds", "Since the daemon was started.", daemon["uptime_s"])
        yield _gauge("resident_bytes", "Memory of the daemon besides the arena.", daemon["rss_besides_arena_bytes"])
        yield _gauge("healthy", "0 when `tiercache stats` gives reasons.", float(tree["health"]["state"] == "ok"))
        for name, value in arena.items():
            if name != "classes":
                yield _gauge(f"arena_{name}", f"The arena's {name.replace('_', ' ')}.", value)
        yield from _tiers(tree["tiers"])
        for name, value in tree["counters"].items():
            text = f"The daemon's counter {name}, in blocks where no unit is named."
            yield CounterMetricFamily(PREFIX + name, text, value)
        yield _latency(tree["latency"])
        leases = [([kind], float(count)) for kind, count in tree["leases"].items()]
        yield _labelled("leases", "Leases that are open, and blocks that wait for their parents.", ["kind"], leases)
        yield _gauge("pinned_bytes", "Bytes that pins keep.", tree["pins"]["bytes"])
        yield _gauge("sessions", "Clients that are connected (up to 256).", len(tree["sessions"]))
        labels = ["namespace", "engine", "rank"]
        names = [[one["fingerprint"], one["engine"], one["rank"]] for one in tree["namespaces"]]
        spaces = [(name, float(one["blocks"])) for name, one in zip(names, tree["namespaces"], strict=True)]
        yield _labelled("namespace_blocks", "Blocks of a namespace in DRAM.", labels, spaces)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _labelled(name: str, text: str, labels: list[str], values: Iterable[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for value in values:
        family.add_metric(*value)
    return family


def _tiers(tiers: Mapping[str, Any]) -> Iterable[Metric]:
    for name, text in _TIERS.items():
        yield _labelled(f"tier_{name}", text, ["tier"], [([tier], its[name]) for tier, its in tiers.items()])
    for name, text in _TIER_COUNTERS.items():
        family = CounterMetricFamily(f"{PREFIX}tier_{name}", text, labels=["tier"])
        for tier, its in tiers.items():
            if name in its:
                family.add_metric([tier], its[name])
        yield family


def _latency(latency: Mapping[str, Any]) -> Metric:
    text = "Time in the daemon, from decoding a request to its encoded reply."
    family = SummaryMetricFamily(f"{PREFIX}request_seconds", text, labels=["request"])
    for request, its in latency.items():
        family.add_metric([request], its["count"], its["sum_s"])
        for quantile in _QUANTILES:
            labels = {"request": request, "quantile": f"0.{quantile[1:3]}"}
            family.add_sample(family.name, labels, its[quantile] / 1e6)
    return family


def metrics_text(tree: Mapping[str, Any]) -> bytes:
    """The text of `/metrics` for a tree of `Client.stats`; an empty tree is a daemon that does not answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(tree))
    return generate_latest(registry)
