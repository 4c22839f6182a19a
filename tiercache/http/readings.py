"""How each metric is read from a tree of `Client.stats(histograms=True)`.

A reading yields `(values of the labels, value)`, and nothing of what the daemon does not have: a tier, quotas, and so
on. All other figures are there: daemon and HTTP process are of one release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tiercache.daemon.observe.traffic import PROBE_ENGINE
from tiercache.ground.units import without_quantities

MAX_NAMESPACES = 32
"""Namespaces with their own metrics: those with the most blocks asked for and stored."""
MAX_QUOTAS = 64
SHARED = "shared"
"""The tier that other hosts use too."""
OWN_CLIENTS = ("http", "tiercache-cli")
"""Names of the sessions of this process and of the commands."""
MAX_REASONS = 16
MAX_REASON_CHARS = 200
NS = 1_000_000_000

Tree = Mapping[str, Any]
Samples = Iterable[tuple[tuple[str, ...], Any]]
"""Values of the labels, in their order, and the value: a number, or a histogram of the stats."""


class Steps(NamedTuple):
    """Buckets of a histogram: upper ends in the daemon's units, and how many of these make one exported unit."""

    ends: tuple[int, ...]
    divisor: int


def seconds(first_ns: int, last_ns: int) -> Steps:
    """1, 2 and 5 of every power of ten between two durations."""
    ends = (digit * 10**power for power in range(13) for digit in (1, 2, 5))
    return Steps(tuple(end for end in ends if first_ns <= end <= last_ns), NS)


def powers(first: int, last: int) -> Steps:
    """Every power of two from `2 ** first` to `2 ** last`."""
    return Steps(tuple(1 << power for power in range(first, last + 1)), 1)


def at(*path: str) -> Callable[[Tree], Samples]:
    """One number of the tree, if present."""

    def samples(tree: Tree) -> Samples:
        value: Any = tree
        for name in path:
            if not isinstance(value, Mapping) or name not in value:
                return
            value = value[name]
        if value is not None:
            yield (), value

    return samples


def hints(*names: str) -> Callable[[Tree], Samples]:
    """These figures of the hints, by name without the unit."""

    def samples(tree: Tree) -> Samples:
        return (((name.removesuffix("_blocks"),), tree["hints"][name]) for name in names)

    return samples


def each_tier(name: str) -> Callable[[Tree], Samples]:
    """A number of each tier of this host that has it, by tier. The shared store has metrics of its own."""
    return lambda tree: (
        ((tier,), figures[name]) for tier, figures in tree["tiers"].items() if tier != SHARED and name in figures
    )


def each_directory(name: str) -> Callable[[Tree], Samples]:
    """A number of each NVMe directory, by its path."""
    return lambda tree: (((directory["path"],), directory[name]) for directory in _directories(tree))


def open_directories(tree: Tree) -> Samples:
    """True if each NVMe directory is open."""
    return (
        ((directory["path"],), int(directory["state"] not in ("opening", "away"))) for directory in _directories(tree)
    )


def histogram(name: str, *labels: str) -> Callable[[Tree], Samples]:
    """The daemon's histograms with that name."""

    def samples(tree: Tree) -> Samples:
        for one in tree["histograms"].get(name, ()):
            yield tuple(one["labels"][label] for label in labels), one

    return samples


def _nvme(tree: Tree) -> Mapping[str, Any]:
    return dict(tree["tiers"].get("nvme", {}))


def _shared(tree: Tree) -> Mapping[str, Any]:
    return dict(tree["tiers"].get(SHARED, {}))


def shared(name: str) -> Callable[[Tree], Samples]:
    """A number of the shared tier, if there is one."""
    return at("tiers", SHARED, name)


def shared_skipped(tree: Tree) -> Samples:
    """Blocks not sent to the shared store, by reason."""
    return _skipped(_shared(tree))


def shared_states(states: Iterable[str]) -> Callable[[Tree], Samples]:
    """1 for the state that the breaker of the shared store is in, 0 for the others."""

    def samples(tree: Tree) -> Samples:
        if figures := _shared(tree):
            for state in states:
                yield (state,), int(figures["breaker"]["state"] == state)

    return samples


def _skipped(tier: Mapping[str, Any]) -> Samples:
    for name, value in tier.items():
        if name.startswith("skipped_"):
            yield (name.removeprefix("skipped_"),), value


def _directories(tree: Tree) -> list[Any]:
    return list(_nvme(tree).get("directories", []))


def reasons(tree: Tree) -> Samples:
    """Why the daemon is unhealthy. Quantities are left out, so that a lasting reason is one series."""
    reasons = map(without_quantities, tree["health"]["reasons"])
    for reason in list(dict.fromkeys(reasons))[:MAX_REASONS]:
        yield (reason[:MAX_REASON_CHARS],), 1


def _below(below: int, shared: int) -> Samples:
    """What was found below DRAM, by tier. `shared` is a part of `below`."""
    yield ("nvme",), below - shared
    yield (SHARED,), shared


def hit_blocks(tree: Tree) -> Samples:
    """By tier."""
    counters = tree["counters"]
    yield ("dram",), counters["match_blocks_hit"]
    yield from _below(counters["match_blocks_below"], counters["match_blocks_shared"])


def hit_tokens(tree: Tree) -> Samples:
    """By tier."""
    traffic = tree["traffic"]
    yield ("dram",), traffic["dram_hit_tokens"]
    yield from _below(traffic["below_hit_tokens"], traffic["shared_hit_tokens"])


def moved(tree: Tree) -> Samples:
    """Bytes by tier and direction."""
    yield ("dram", "in"), tree["counters"]["stored_bytes"]
    yield ("dram", "out"), tree["traffic"]["read_bytes"]
    if nvme := _nvme(tree):
        yield ("nvme", "in"), nvme["written_bytes"] + nvme["direct_stored_bytes"]
        yield ("nvme", "out"), nvme["promoted_bytes"] + nvme["direct_bytes"]
    if shared := _shared(tree):
        yield (SHARED, "in"), shared["written_bytes"]
        yield (SHARED, "out"), shared["fetched_bytes"]


def evicted(tree: Tree) -> Samples:
    """Blocks by tier."""
    yield ("dram",), tree["counters"]["evicted_blocks"]
    if nvme := _nvme(tree):
        yield ("nvme",), nvme["evicted_blocks"]


def queues(tree: Tree) -> Samples:
    """By queue, and by directory for a disk's queue."""
    yield ("parked_requests", ""), tree["leases"]["parked_requests"]
    yield ("pending_blocks", ""), tree["leases"]["pending_blocks"]
    if nvme := _nvme(tree):
        yield ("write_behind", ""), nvme["write_queue_blocks"]
    for directory in _directories(tree):
        for priority, count in directory["waiting"].items():
            yield (f"disk_{priority}", directory["path"]), count
        yield ("disk_running", directory["path"]), directory["in_flight"] - directory["queued"]


def skipped(tree: Tree) -> Samples:
    """Blocks not written to NVMe, by reason."""
    return _skipped(_nvme(tree))


def failures(tree: Tree) -> Samples:
    """By directory, with 0 from the start: Prometheus sees no rise in a counter that begins at 1."""
    for directory in _directories(tree):
        yield (directory["path"],), sum(directory["errors"].values())


def engines(tree: Tree) -> Samples:
    """Clients other than this process and the commands."""
    yield (), sum(1 for one in tree["sessions"] if one["name"] not in OWN_CLIENTS)


def errors(tree: Tree) -> Samples:
    """By directory and errno."""
    for directory in _directories(tree):
        for number, count in directory["errors"].items():
            yield (directory["path"], str(number)), count


def namespaces_of(tree: Tree) -> list[Any]:
    """Namespaces with their own metrics: in use, and not that of health checks."""
    listed = [one for one in tree["namespaces"] if one["asked_blocks"] or one["blocks"] or one["below_blocks"]]
    listed = [one for one in listed if one["engine"] != PROBE_ENGINE]
    listed.sort(key=lambda one: (-one["asked_blocks"] - one["blocks"] - one["below_blocks"], one["id"]))
    return listed[:MAX_NAMESPACES]


def namespaces(values: Callable[[Any], Samples]) -> Callable[[Tree], Samples]:
    """What `values` reads of one namespace, for each namespace with its own metrics."""

    def samples(tree: Tree) -> Samples:
        for one in namespaces_of(tree):
            for labels, value in values(one):
                yield (one["fingerprint"], one["engine"], one["rank"], *labels), value

    return samples


def quotas(name: str) -> Callable[[Tree], Samples]:
    """A number of each quota, by its owner and tier."""
    return lambda tree: (((one["name"], one["tier"]), one[name]) for one in tree.get("quotas", ())[:MAX_QUOTAS])


def blocks_by_tier(one: Any) -> Samples:
    """Blocks of one namespace by tier."""
    yield ("dram",), one["blocks"]
    yield ("nvme",), one["below_blocks"]


def bytes_by_tier(one: Any) -> Samples:
    """Bytes of one namespace by tier."""
    yield ("dram",), one["blocks"] * one["block_bytes"]
    yield ("nvme",), one["below_blocks"] * one["block_bytes"]


def asked_blocks(one: Any) -> Samples:
    """Blocks looked up."""
    yield (), one["asked_blocks"]


def hits_by_tier(one: Any) -> Samples:
    """Blocks found, by tier."""
    yield ("dram",), one["hit_blocks"]
    yield from _below(one["hit_below_blocks"], one["hit_shared_blocks"])
