"""What operators see of the shared tier, on two daemons that share a real Valkey: figures, flushes, a store away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from daemon_rig import started_by
from prometheus_client.parser import text_string_to_metric_families
from valkey_rig import ValkeyServer
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.cli.readings import Reading
from tiercache.cli.top.history import RecentReadings
from tiercache.cli.top.view import ViewState, frame
from tiercache.http.measured.family import PREFIX
from tiercache.http.metrics import metrics_text

BLOCKS = 8
BLOCK_BYTES = 64 << 10
SPEC = tiercache.NamespaceSpec(engine="test/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES)
PASSWORD = "open-sesame"


class Host(NamedTuple):
    """A daemon, and the engine beside it."""

    address: str
    connector: tiercache.Connector
    pool: np.ndarray[Any, Any]

    @property
    def tree(self) -> dict[str, Any]:
        return self.connector.client.stats()

    @property
    def shared(self) -> dict[str, Any]:
        return dict(self.tree["tiers"]["shared"])

    def store(self, keys: bytes) -> None:
        """Store a prompt, and wait until the store of all hosts has it."""
        written = self.shared["written_blocks"]
        self.connector.store(keys, range(BLOCKS))
        wait_until(lambda: self.shared["written_blocks"] == written + BLOCKS, "the blocks are in the store")

    def found(self, keys: bytes) -> int:
        """How many leading blocks are found and loaded."""
        match = self.connector.match(keys)
        return int(self.connector.load(match, range(BLOCKS, BLOCKS + match.blocks)))


def prompt(name: int) -> bytes:
    first = 1000 * name
    return bytes(tiercache.KeyChain(tiercache.root_key("model"), 4, range(first, first + 4 * BLOCKS)).packed())


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def hosts(valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    assert valkey.ask("CONFIG", "SET", "requirepass", PASSWORD) == b"+OK"
    url = valkey.url.replace("://", f"://:{PASSWORD}@")
    place = tmp_path_factory.mktemp("hosts")
    settings: dict[str, Any] = {"shared": url, "shared_plain": True, "shared_lookup_timeout": "1s"}
    with (
        started_by("brief_daemon.py"),
        tiercache.launch("8MiB", **settings, log=place / "a.log") as one,
        tiercache.launch("8MiB", **settings, log=place / "b.log") as other,
    ):
        found = []
        for daemon in (one, other):
            blocks = np.arange(32 * BLOCK_BYTES, dtype=np.uint32).astype(np.uint8).reshape(32, BLOCK_BYTES)
            pool = tiercache.Pool.from_blocks(blocks)
            connector = tiercache.connect(daemon.address, namespace=SPEC, pool=pool, required=True)
            found.append(Host(daemon.address, connector, blocks))
        yield found[0], found[1]
        for host in found:
            host.connector.close()
    for log in place.iterdir():
        assert PASSWORD not in log.read_text()


def metrics(tree: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels."""
    families = text_string_to_metric_families(metrics_text(tree).decode())
    return {
        (sample.name.removeprefix(PREFIX), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_hits_from_another_host_are_told_apart(hosts: tuple[Host, Host], capsys: pytest.CaptureFixture[str]) -> None:
    here, there = hosts
    keys = prompt(1)
    here.store(keys)
    before = there.tree
    assert there.found(keys) == BLOCKS
    wait_until(lambda: there.shared["fetched_blocks"] == BLOCKS, "they were fetched")
    tree = there.connector.client.stats(histograms=True)
    told = metrics(tree)
    assert told["match_blocks_shared_total",] == told["hit_blocks_total", "shared"] == BLOCKS
    assert told["match_blocks_below_total",] == BLOCKS
    assert told["hit_blocks_total", "nvme"] == told["hit_tokens_total", "nvme"] == 0
    assert told["hit_tokens_total", "shared"] == 4 * BLOCKS
    assert told["namespace_hit_blocks_total", SPEC.fingerprint(), "test/1", "tp 0/1 pp 0/1", "shared"] == BLOCKS
    assert told["shared_fetched_blocks_total",] == BLOCKS
    assert told["shared_fetched_bytes_total",] == told["moved_bytes_total", "shared", "out"] >= BLOCKS * BLOCK_BYTES
    assert told["shared_breaker_state", "closed"] == 1
    assert told["shared_breaker_state", "open"] == told["shared_bad_blocks_total",] == 0
    assert not any(name.startswith("tier_") and "shared" in labels for name, *labels in told), "it has its own"
    sent = metrics(here.connector.client.stats())
    assert sent["moved_bytes_total", "shared", "in"] == sent["shared_written_bytes_total",] >= BLOCKS * BLOCK_BYTES
    # The same for people.
    assert main(["stats", "summary", "tiers", "--address", there.address]) == 0
    out = capsys.readouterr().out
    assert "100.0% from the shared store" in out
    assert PASSWORD not in out
    recent = RecentReadings()
    for second, reading in enumerate((before, tree)):
        recent.take(Reading(float(second), reading))
    lines = [line.plain for line in frame(recent, ViewState("/run", 1.0), 100, 40)]
    assert any(line.startswith("shared") and "in use" in line for line in lines)
    assert any(line.startswith("shared") and "100%" in line for line in lines)


def test_its_password_is_shown_nowhere(hosts: tuple[Host, Host], capsys: pytest.CaptureFixture[str]) -> None:
    here = hosts[0]
    shown = [Path(f"/proc/{here.tree['daemon']['pid']}/cmdline").read_text(), str(here.tree)]
    for options in ([], ["--json"]):
        assert main(["config", "--running", *options, "--address", here.address]) == 0
        shown.append(capsys.readouterr().out)
    assert "valkey://:***@127.0.0.1" in shown[-1]
    assert [text for text in shown if PASSWORD in text] == []


def forget_here(*hosts: Host) -> None:
    for host in hosts:
        host.connector.flush(tier="dram")


def flush(host: Host, *options: str) -> int:
    return main(["flush", "--yes", *options, "--address", host.address])


@pytest.mark.parametrize("what", ["everything", "namespace", "prefix"])
def test_a_flush_of_the_store_is_one_for_every_host(
    hosts: tuple[Host, Host], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = hosts
    keys = prompt(10 + len(what))
    options = {"namespace": ["--namespace", SPEC.fingerprint()[:8]], "prefix": ["--prefix", keys[-16:].hex()]}
    here.store(keys)
    assert there.found(keys) == BLOCKS
    if what != "prefix":  # its place in the chain is known only while the block is in DRAM
        forget_here(there)
    forget_here(here)  # what a host still has it sends again when it is asked for
    assert flush(there, "--tier", "shared", *options.get(what, [])) == 0
    assert capsys.readouterr().out == "flushed: no host finds these blocks in the shared store any more\n"
    forget_here(there)
    assert there.found(keys) == here.found(keys) == 0


@pytest.mark.stress
def test_a_flush_while_the_store_is_away_is_told_when_it_is_back(
    hosts: tuple[Host, Host], valkey: ValkeyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = hosts
    keys = prompt(4)
    here.store(keys)
    forget_here(here, there)
    valkey.stop()
    try:
        assert flush(there, "--tier", "shared") == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "the shared store is away and has not been told: the flush is kept, across restarts too" in err
        assert "disk" not in err
        told = metrics(there.tree)
        assert told["shared_flushes_waiting",] == 1
        assert told["health_problems", "shared"] >= 1
        assert there.found(keys) == 0, "nothing of the store is used meanwhile"
        wait_until(lambda: metrics(there.tree)["shared_breaker_state", "closed"] == 0, "the breaker opens")
        assert metrics(there.tree)["shared_breaker_opened_total",] == 1
    finally:
        valkey.go_on()
    wait_until(lambda: there.shared["flushes_waiting"] == 0, "the store was told")
    wait_until(lambda: there.tree["health"]["state"] == "ok", "all is well again")
    forget_here(here, there)
    assert there.found(keys) == here.found(keys) == 0
