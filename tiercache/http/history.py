"""History: figures of the last half hour, so that a page just opened has something to show.

A thread asks the daemon every 2 s while a page is open and every 10 s otherwise, and keeps what charts show: at most
900 samples of some thirty numbers, about 1 MB. That costs the daemon's loop one `stats` request each time, a
millisecond or two, however many pages are open.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tiercache.errors import TierCacheError
from tiercache.ground.histograms import percentiles_of, since
from tiercache.http.readings import namespaces_of

WATCHED_S = 2.0
IDLE_S = 10.0
LOOKED_AT_S = 15.0
"""How long a page counts as open after its last request."""
KEEP_S = 1800.0
MAX_SAMPLES = int(KEEP_S / WATCHED_S)
HOT_PREFIXES = 32
SLOW_EVERY_S = 10.0
"""Seconds between updates of hot prefixes and model names, which change slowly and cost as much as all the rest."""
MAX_SESSIONS = 32

logger = logging.getLogger("tiercache.http")

Tree = Mapping[str, Any]
Value = float | None


class _Step(NamedTuple):
    """Two readings without a restart of the daemon between them, and the seconds between them."""

    before: Tree
    now: Tree
    seconds: float

    def grown(self, *path: str) -> float:
        """The increase of a counter."""
        return float(_number(self.now, path) - _number(self.before, path))

    def rate(self, *path: str) -> float:
        """The same per second."""
        return self.grown(*path) / self.seconds

    def share(self, *path: str) -> Value:
        """Share of the tokens looked up between the readings; None if there were none."""
        asked = self.grown("traffic", "asked_tokens")
        return self.grown(*path) / asked if asked else None

    def percentiles_s(self, name: str, **labels: str) -> tuple[Value, Value]:
        """p50 and p99 in seconds of the observations meanwhile, over all histograms with that name and labels."""
        found: Counter[int] = Counter()
        earlier = {_labels(one): one["buckets"] for one in _histograms(self.before, name)}
        for one in _histograms(self.now, name):
            if labels.items() <= one["labels"].items():
                found.update(dict(since(one["buckets"], earlier.get(_labels(one), ()))))
        if not found:
            return None, None
        p50, p99 = percentiles_of(sorted(found.items()), (0.5, 0.99))
        return p50 / 1e9, p99 / 1e9


def _histograms(tree: Tree, name: str) -> list[Any]:
    return list(tree.get("histograms", {}).get(name, ()))


def _labels(histogram: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(histogram["labels"].items())


def _number(tree: Tree, path: tuple[str, ...]) -> Any:
    """The number at a path; 0 if it is missing, for example of a tier that the daemon does not have."""
    value: Any = tree
    for name in path:
        value = value.get(name, {})
    return value or 0


def _figures(step: _Step) -> dict[str, Value]:
    """One sample. Rates are per second; unknown values are None."""
    now, nvme = step.now, "nvme"
    match_p50, match_p99 = step.percentiles_s("request_ns", request="Match")
    _, reserve_p99 = step.percentiles_s("request_ns", request="Reserve")
    read_p50, read_p99 = step.percentiles_s("promotion_ns")
    _, write_p99 = step.percentiles_s("demotion_ns")
    disks = now["tiers"].get(nvme, {}).get("directories", ())
    below, shared = step.share("traffic", "below_hit_tokens"), step.share("traffic", "shared_hit_tokens")
    return {
        "asked_tokens": step.rate("traffic", "asked_tokens"),
        "requests": step.rate("counters", "requests"),
        "hit_dram": step.share("traffic", "dram_hit_tokens"),
        "hit_nvme": None if below is None else below - (shared or 0.0),
        "hit_shared": shared,
        "dram_in_bytes": step.rate("counters", "stored_bytes"),
        "dram_out_bytes": step.rate("traffic", "read_bytes"),
        "nvme_in_bytes": step.rate("tiers", nvme, "written_bytes") + step.rate("tiers", nvme, "direct_stored_bytes"),
        "nvme_out_bytes": step.rate("tiers", nvme, "promoted_bytes") + step.rate("tiers", nvme, "direct_bytes"),
        "shared_in_bytes": step.rate("tiers", "shared", "written_bytes"),
        "shared_out_bytes": step.rate("tiers", "shared", "fetched_bytes"),
        "match_p50_s": match_p50,
        "match_p99_s": match_p99,
        "reserve_p99_s": reserve_p99,
        "disk_read_p50_s": read_p50,
        "disk_read_p99_s": read_p99,
        "disk_write_p99_s": write_p99,
        "dram_bytes": _number(now, ("tiers", "dram", "bytes")),
        "dram_capacity_bytes": _number(now, ("tiers", "dram", "capacity_bytes")),
        "nvme_bytes": _number(now, ("tiers", nvme, "bytes")),
        "nvme_capacity_bytes": _number(now, ("tiers", nvme, "capacity_bytes")),
        "dram_evicted": step.rate("counters", "evicted_blocks"),
        "nvme_evicted": step.rate("tiers", nvme, "evicted_blocks"),
        "queue_write": _number(now, ("tiers", nvme, "write_queue_blocks")),
        "queue_shared": _number(now, ("tiers", "shared", "write_queue_blocks")),
        "queue_disk": sum(disk["in_flight"] for disk in disks),
        "queue_requests": _number(now, ("leases", "parked_requests")),
    }


COLUMNS = (
    "asked_tokens",
    "requests",
    "hit_dram",
    "hit_nvme",
    "hit_shared",
    "dram_in_bytes",
    "dram_out_bytes",
    "nvme_in_bytes",
    "nvme_out_bytes",
    "shared_in_bytes",
    "shared_out_bytes",
    "match_p50_s",
    "match_p99_s",
    "reserve_p99_s",
    "disk_read_p50_s",
    "disk_read_p99_s",
    "disk_write_p99_s",
    "dram_bytes",
    "dram_capacity_bytes",
    "nvme_bytes",
    "nvme_capacity_bytes",
    "dram_evicted",
    "nvme_evicted",
    "queue_write",
    "queue_shared",
    "queue_disk",
    "queue_requests",
)


class HistorySample(msgspec.Struct, array_like=True, frozen=True):
    """One moment in the charts. Numbers count up; `values` follow `COLUMNS`."""

    number: int
    unix_s: float
    values: list[Value]


class HistoryRecorder:
    """Makes samples from trees and keeps those of the last half hour. Thread-safe.

    Args:
        unix_s: the time of day; `clock_s`: monotonic seconds.
    """

    def __init__(self, unix_s: Callable[[], float] = time.time, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._unix_s = unix_s
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._samples: deque[HistorySample] = deque(maxlen=MAX_SAMPLES)
        self._number = 0
        self._tree: Tree | None = None
        self._tree_s = 0.0
        self._shown = msgspec.Raw(b"null")
        self._problem: str | None = "it has not been asked yet"
        self._problem_since_s = unix_s()
        self._life = os.urandom(6).hex()

    def note(self, tree: Tree) -> None:
        """Add the daemon's present statistics."""
        now_s = self._clock_s()
        with self._lock:
            before, seconds = self._tree, now_s - self._tree_s
            same_life = before is not None and before["daemon"]["generation"] == tree["daemon"]["generation"]
            if before is not None and same_life and seconds > 0:
                figures = _figures(_Step(before, tree, seconds))
                self._add([_rounded(figures[name]) for name in COLUMNS])
            else:
                self._add([None] * len(COLUMNS))
            self._tree, self._tree_s, self._problem = tree, now_s, None
            self._shown = msgspec.Raw(msgspec.json.encode(_shown(tree)))

    def miss(self, problem: str) -> None:
        """Record that the daemon does not answer."""
        with self._lock:
            if self._problem is None:
                self._problem_since_s = self._unix_s()
                self._add([None] * len(COLUMNS))  # the charts' lines end here
            self._problem = problem
            self._tree = None

    def _add(self, values: list[Value]) -> None:
        self._number += 1
        unix_s = round(self._unix_s(), 1)
        self._samples.append(HistorySample(self._number, unix_s, values))
        while self._samples[0].unix_s < unix_s - KEEP_S:
            self._samples.popleft()

    def encode(self, after: int, life: str) -> bytes:
        """As JSON: the samples after number `after` since this process started, and the daemon's last statistics."""
        with self._lock:
            known = after if life == self._life else 0
            return msgspec.json.encode(
                {
                    "life": self._life,
                    "now_unix_s": round(self._unix_s(), 1),
                    "interval_s": WATCHED_S,
                    "keep_s": KEEP_S,
                    "reachable": self._problem is None,
                    "problem": self._problem,
                    "problem_since_unix_s": round(self._problem_since_s, 1),
                    "columns": COLUMNS,
                    "samples": [sample for sample in self._samples if sample.number > known],
                    "stats": self._shown,
                }
            )


def _rounded(value: Value) -> Value:
    return None if value is None else float(f"{value:.5g}")


def _shown(tree: Tree) -> dict[str, Any]:
    """The part of a tree that a page shows: without histograms, and with lists cut to a limit."""
    left_out = {"histograms", "namespaces", "sessions", "models"}
    models = tree.get("models", {})
    return {
        **{name: branch for name, branch in tree.items() if name not in left_out},
        "namespaces": [{**one, "models": models.get(one["fingerprint"], [])} for one in namespaces_of(tree)],
        "namespace_count": len(tree["namespaces"]),
        "sessions": [
            {name: value for name, value in session.items() if name != "counters"}
            for session in tree["sessions"][:MAX_SESSIONS]
        ],
        "session_count": len(tree["sessions"]),
    }


class History:
    """Polls the daemon in its own thread, until the process ends.

    `ask(hot_prefixes)` gives the daemon's stats with histograms and so many prefixes; `ask_models()` gives the names
    of models by the fingerprint of a namespace.
    """

    def __init__(self, ask: Callable[[int], Tree], ask_models: Callable[[], Mapping[str, list[str]]]) -> None:
        self._ask = ask
        self._ask_models = ask_models
        self._slow: dict[str, Any] = {}
        self._slow_s = float("-inf")
        self._recorder = HistoryRecorder()
        self._looked = threading.Event()
        self._looked_s = -LOOKED_AT_S

    def start(self) -> None:
        """Start polling. Does not block."""
        threading.Thread(target=self._run, name="history", daemon=True).start()

    def encode(self, after: int, life: str) -> bytes:
        """See `HistoryRecorder.encode`. Marks a page as open."""
        was_idle = time.monotonic() - self._looked_s > LOOKED_AT_S
        self._looked_s = time.monotonic()
        if was_idle:
            self._looked.set()
        return self._recorder.encode(after, life)

    def _tree(self, now_s: float) -> Tree:
        if now_s - self._slow_s < SLOW_EVERY_S:
            return {**self._ask(0), **self._slow}
        tree = self._ask(HOT_PREFIXES)
        self._slow = {"hot_prefixes": list(tree.get("hot_prefixes", [])), "models": self._ask_models()}
        self._slow_s = now_s
        return {**tree, **self._slow}

    def _run(self) -> None:
        while True:
            started_s = time.monotonic()
            try:
                self._recorder.note(self._tree(started_s))
            except TierCacheError as error:
                self._recorder.miss(str(error))
            except Exception:
                # A bug: the thread continues.
                logger.exception("what the daemon says could not be taken in")
                self._recorder.miss("what it says is not understood; the log says why")
            pause_s = WATCHED_S if started_s - self._looked_s < LOOKED_AT_S else IDLE_S
            self._looked.wait(max(0.1, started_s + pause_s - time.monotonic()))
            self._looked.clear()
