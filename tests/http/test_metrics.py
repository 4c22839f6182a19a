"""Prometheus metrics: documented, in Prometheus' format, with the figures of the stats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from http_helpers import BLOCK, BLOCK_BYTES, chain, connect, request, spec, tokens_of, url_in
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

import tiercache
from tiercache.daemon.ground.counters import Counters
from tiercache.http.families import COUNTERS, PREFIX, SHARED
from tiercache.http.metrics import FAMILIES, metrics_text, table
from tiercache.http.readings import MAX_NAMESPACES, MAX_REASONS

ROOT = Path(__file__).resolve().parents[2]
ONLY_WHEN_BROKEN = {"health_reason_info"}


class Told:
    """A text of `/metrics`, as prometheus_client reads it."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = [sample for family in self.families.values() for sample in family.samples]
        pairs = [((sample.name, *sample.labels.values()), sample.value) for sample in samples]
        self.values = dict(pairs)
        assert len(pairs) == len(self.values), "a sample is there twice"

    def __call__(self, name: str, *labels: str) -> float:
        return self.values[(name if name.startswith("process_") else PREFIX + name, *labels)]

    def steps(self, name: str, *labels: str) -> list[tuple[float, float]]:
        """The buckets of one histogram."""
        start = (f"{PREFIX}{name}_bucket", *labels)
        return [(float(key[-1]), value) for key, value in self.values.items() if key[:-1] == start]


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, tiercache.Client, Path]]:
    """The port of a daemon with a disk, after blocks went down and came up; nothing happens any more."""
    place = tmp_path_factory.mktemp("busy")
    settings: dict[str, Any] = {"nvme": place / "nvme", "nvme_size": "64MiB", "nvme_segment": "16MiB"}
    settings |= {"quota": "team-a=4MiB", "nvme_quota": "team-a=8MiB"}
    with (
        tiercache.launch("16MiB", region="2MiB", http="127.0.0.1:0", log=place / "log", **settings) as daemon,
        connect(daemon.address, spec()) as connector,
    ):
        keys, tier = chain(tokens_of("busy", 30)), connector.client.stats
        connector.store(keys, range(30))
        wait_until(lambda: tier()["tiers"]["nvme"]["blocks"] == 30, "all blocks are on NVMe")
        connector.flush(tier="dram")
        match = connector.match(keys + bytes(16 * 10))
        assert connector.load(match, range(30)) == 30
        wait_until(lambda: tier()["tiers"]["nvme"]["promoted_blocks"] == 30, "all blocks are back")
        connector.release(connector.match(keys))
        yield url_in(Path(daemon.log)), connector.client, place / "nvme"


def test_the_documented_table_is_that_of_the_code() -> None:
    text = (ROOT / "daemon" / "MONITORING.md").read_text()
    assert table() in text, "put what `python -m tiercache.http.metrics` prints into daemon/MONITORING.md"


def test_every_counter_has_its_metric() -> None:
    own = {field.name for field in fields(Counters)} | {"connections_refused"}
    assert set(COUNTERS) == own, "name each of daemon/ground/counters.py in tiercache/http/families.py, and no other"
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_all_families_are_there_and_have_a_meaning(busy: tuple[str, tiercache.Client, Path]) -> None:
    told = Told(request(f"{busy[0]}/metrics").text)
    found = {name.removeprefix(PREFIX): family for name, family in told.families.items()}
    left_out = {*ONLY_WHEN_BROKEN, "nvme_write_amplification_ratio"}  # too little was written
    left_out |= {
        family.name for family in SHARED
    }  # there is no shared tier: see daemon/tiers/shared/test_shared_daemons.py
    wanted = {family.name.removesuffix("_total"): family for family in FAMILIES if family.name not in left_out}
    assert set(found) == set(wanted)
    for name, family in wanted.items():
        assert (found[name].type, found[name].documentation) == (family.kind, family.text)
        labels = {label for sample in found[name].samples for label in sample.labels}
        assert labels - {"le"} == set(family.labels), name


def test_metrics_are_what_stats_say(busy: tuple[str, tiercache.Client, Path]) -> None:
    url, client, nvme = busy
    told = Told(request(f"{url}/metrics").text)
    tree = client.stats()
    assert told("up") == told("healthy") == 1
    assert told("arena_bytes") == tree["arena"]["bytes"]
    assert told("stored_blocks_total") == tree["counters"]["stored_blocks"] == 30
    assert told("request_seconds_count", "Reserve") == tree["latency"]["Reserve"]["count"]
    assert told("request_seconds_sum", "Reserve") == pytest.approx(tree["latency"]["Reserve"]["sum_s"])
    p99 = tree["latency"]["Match"]["p99_us"] / 1e6
    reached = min(end for end, count in told.steps("request_seconds", "Match") if count >= 2)
    assert reached / 2.5 <= p99 <= reached
    asked, block = (40 + 30) * BLOCK, BLOCK_BYTES
    assert told("asked_tokens_total") == told("match_asked_tokens_sum") == asked
    assert told("hit_tokens_total", "dram") + told("hit_tokens_total", "nvme") == told("match_hit_tokens_sum") == 240
    assert told("hit_tokens_total", "nvme") == told("hit_blocks_total", "nvme") * BLOCK == 30 * BLOCK
    moved = [told("moved_bytes_total", tier, way) for tier in ("dram", "nvme") for way in ("in", "out")]
    assert (moved[0], moved[2], moved[3]) == (30 * block, 30 * block, 30 * block)
    assert moved[1] >= 30 * block
    directory = str(nvme)
    assert told("demotion_seconds_count", directory) == told("promotion_seconds_count", directory, "load") == 30
    assert [told("disk_call_bytes_sum", directory, call) for call in ("write", "read")] == [30 * block] * 2
    assert told("disk_checksum_failures_total", directory) == 0
    assert told("lease_seconds_count", "read") == 2
    name = spec().fingerprint(), "test/1", "tp 0/1 pp 0/1"
    assert told("namespace_bytes", *name, "nvme") == told("namespace_bytes", *name, "dram") == 30 * block
    assert told("namespace_asked_blocks_total", *name) == 70
    assert told("namespace_hit_blocks_total", *name, "dram") == 30
    for tier, limit_bytes in (("dram", 4 << 20), ("nvme", 8 << 20)):
        assert told("quota_bytes", "team-a", tier) == limit_bytes
        assert told("quota_used_bytes", "team-a", tier) == told("quota_refused_blocks_total", "team-a", tier) == 0
    assert (told("engines"), told("sessions")) == (1, 2), "the HTTP process is a client too"


def test_the_number_of_series_has_a_limit(busy: tuple[str, tiercache.Client, Path]) -> None:
    tree = busy[1].stats(histograms=True)
    one = tree["namespaces"][0]
    many = [{**one, "id": number, "fingerprint": f"{number:032x}", "asked_blocks": number} for number in range(500)]
    health = {"state": "degraded", "reasons": [f"/mnt/nvme{number}: it hangs for {number} s" for number in range(99)]}
    health["reasons"] += ["it has hung for 3 s", "it has hung for 4.5 s"] * 2
    told = Told(metrics_text({**tree, "namespaces": many, "health": {**health, "parts": {"nvme": 99}}}).decode())
    samples = told.families["tiercache_namespace_asked_blocks"].samples
    assert {sample.labels["namespace"] for sample in samples} == {
        f"{number:032x}" for number in range(500 - MAX_NAMESPACES, 500)
    }
    assert len(told.families["tiercache_health_reason_info"].samples) == MAX_REASONS
    assert (told("healthy"), told("health_problems", "nvme"), told("namespaces")) == (0, 99, 500)
    told = Told(metrics_text({**tree, "health": {**health, "reasons": health["reasons"][-4:], "parts": {}}}).decode())
    assert told("health_reason_info", "it has hung for N s") == 1
    assert len(told.families["tiercache_health_reason_info"].samples) == 1


def test_a_silent_daemon_is_down_and_nothing_else() -> None:
    assert Told(metrics_text({}).decode()).values == {("tiercache_up",): 0}
