"""The histograms of `stats`: raw buckets, which readers turn into what they show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tiercache.ground.histograms import Histogram, LatencyHistogram

if TYPE_CHECKING:
    from tiercache.daemon.tiers.nvme.tier import NvmeTier

    from .traffic import Traffic


def build_histograms(
    traffic: Traffic,
    leases: Mapping[str, LatencyHistogram],
    latency: Mapping[str, LatencyHistogram],
    nvme: NvmeTier | None,
) -> dict[str, list[dict[str, Any]]]:
    """By name, one for each combination of labels. Sums and bucket bounds are in the unit that ends the name.

    `leases`: how long leases of clients were held, by kind. `latency`: that of requests, by kind. Some 10 us for each
    non-empty one.
    """
    found = {
        "request_ns": [_shown(histogram, request=name) for name, histogram in sorted(latency.items())],
        "asked_tokens": [_shown(traffic.asked_tokens)],
        "hit_tokens": [_shown(traffic.hit_tokens)],
        "lease_ns": [_shown(histogram, kind=kind) for kind, histogram in leases.items()],
    }
    if nvme is not None:
        found |= {"promotion_ns": [], "demotion_ns": [], "disk_call_ns": [], "disk_call_bytes": []}
        for path, queue in nvme.queues().items():
            for urgency in ("load", "prefetch"):
                found["promotion_ns"].append(_shown(queue.latency[urgency], directory=path, urgency=urgency))
            found["demotion_ns"].append(_shown(queue.latency["write"], directory=path))
            for call in ("read", "write"):
                labels = {"directory": path, "call": call}
                found["disk_call_ns"].append(_shown(queue.latency[f"{call}_call"], **labels))
                found["disk_call_bytes"].append(_shown(queue.call_bytes[f"{call}_call"], **labels))
    return found


def _shown(histogram: Histogram, **labels: str) -> dict[str, Any]:
    return {"labels": labels, "count": histogram.count, "sum": histogram.sum, "buckets": histogram.buckets()}
