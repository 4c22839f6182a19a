"""A real daemon records its requests, and a replay of the file gives the same hits and the same blocks."""

from __future__ import annotations

import mmap
import random
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from waiting import wait_until

import tiercache
from tiercache.errors import DaemonUnavailable
from tiercache.protocol.messages import KEY_BYTES, Inspect
from tiercache.replay.formats.recorded import Recorded, RecordedReader
from tiercache.replay.formats.trace import Trace
from tiercache.replay.requests import RequestKind
from tiercache.replay.simulation import Outcome, Simulation

CHILD = Path(__file__).with_name("agreement_child.py")
BLOCK_BYTES = 64 << 10
SPEC = tiercache.NamespaceSpec(engine="test/1", layout="x", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES)
REQUESTS = 120
MOST_NEW = 8
"""Blocks of one store: fewer than the daemon keeps slots free, so that no write waits for the deletion of a row."""
WAIT_S = 60.0


class Clock:
    """The clock of the daemon, in a file that the daemon reads."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(struct.pack("d", 0.0))
        with path.open("r+b") as file:
            self._seconds = mmap.mmap(file.fileno(), 8)
        self.now_s = 1000.0
        self.go_on(0.0)

    def go_on(self, seconds: float) -> None:
        self.now_s += seconds
        self._seconds[:8] = struct.pack("d", self.now_s)


@contextmanager
def daemon(run_dir: str, clock_file: Path, **settings: object) -> Iterator[None]:
    """A daemon process whose clock is that file. It must exit with status 0."""
    flags = [text for key, value in settings.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, str(CHILD), str(clock_file), "--run-dir", run_dir, "--log-level", "warning", *flags]
    process = subprocess.Popen(command)
    try:
        yield
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


def connect(run_dir: str) -> tiercache.Connector:
    """A connector, once the daemon answers and has all of its memory."""
    pool = tiercache.Pool.from_blocks(np.zeros((32, BLOCK_BYTES), np.uint8))
    waits = {"request_timeout_s": WAIT_S, "load_timeout_s": WAIT_S, "connect_timeout_s": WAIT_S}

    def connected() -> tiercache.Connector | None:
        with suppress(DaemonUnavailable):
            return tiercache.connect(run_dir, namespace=SPEC, pool=pool, required=True, **waits)
        return None

    connector = wait_until(connected, "the daemon answers", WAIT_S)

    def ready() -> bool:
        stats = connector.client.stats()
        whole = stats["health"]["state"] == "ok" and stats["tiers"]["dram"]["capacity_bytes"] == 4 << 20
        return whole and stats["tiers"]["nvme"]["directories"][0]["state"] == "ok"

    wait_until(ready, "the daemon has all of its memory", WAIT_S)
    return connector


def conversations(seed: int) -> Iterator[list[int]]:
    """Token ids of prompts: conversations that grow, fork and begin anew, with two common beginnings."""
    chance, fresh = random.Random(seed), iter(range(1, 1 << 30))
    systems = [[next(fresh) for _ in range(4 * length)] for length in (2, 5)]
    chats: list[list[int]] = []
    for _ in range(REQUESTS):
        if len(chats) < 6 or chance.random() < 0.15:
            chats.append(list(chance.choice(systems)))
        chat = chats[-min(len(chats), 1 + int(chance.paretovariate(0.5)))]
        if chance.random() < 0.1:
            chat = chat[: 4 * chance.randint(1, len(chat) // 4)]
            chats.append(chat)
        chat += [next(fresh) for _ in range(4 * chance.randint(1, MOST_NEW // 2))]
        if len(chat) > 4 * 20:
            chats.remove(chat)
        yield chat


def wait_until_idle(connector: tiercache.Connector) -> dict[str, int]:
    """Until everything is written, recorded in the catalog, and free again; what NVMe says then."""

    def idle() -> dict[str, int] | None:
        stats = connector.client.stats()
        nvme = stats["tiers"]["nvme"]
        one = nvme["directories"][0]
        waiting = nvme["write_queue_blocks"] + nvme["write_in_flight_bytes"] + nvme["promotion_in_flight_bytes"]
        if waiting + one["database_queue"] + stats["leases"]["read"] + stats["leases"]["write"]:
            return None
        return {name: nvme[name] for name in ("written_blocks", "promoted_blocks", "evicted_blocks")}

    return wait_until(idle, "the daemon comes to rest", WAIT_S)


def chunks(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def resident(connector: tiercache.Connector, keys: set[bytes]) -> dict[str, set[bytes]]:
    """Which of these blocks the daemon has, by tier."""
    session, found = connector.client.session(), {"dram": set[bytes](), "nvme": set[bytes]()}
    for key in keys:
        for place in session.call(Inspect, namespaces=[], key=key).blocks:
            found[place.tier].add(key)
    return found


def work(connector: tiercache.Connector, clock: Clock) -> tuple[list[bytes], dict[str, int]]:
    """Load each prompt as far as it is there, and store the rest; one flush in between. Returns the requests."""
    chance, asked, tallies = random.Random(2), [], {}
    for number, tokens in enumerate(conversations(1)):
        clock.go_on(chance.choice((0.125, 0.5, 4.0, 60.0)))
        keys = tiercache.KeyChain(tiercache.root_key("agree"), 4, tokens).packed()
        blocks = len(keys) // KEY_BYTES
        asked.append(keys)
        match = connector.match(keys)
        loaded = connector.load(match, list(range(match.blocks))) if match.blocks else 0
        assert loaded == match.blocks
        wait_until_idle(connector)
        if loaded < blocks:
            stored = connector.store(keys, list(range(blocks - loaded)), first=loaded)
            assert stored.stored + stored.present + stored.dropped == blocks - loaded
        tallies = wait_until_idle(connector)
        if number == REQUESTS // 2:
            connector.flush(key=keys[2 * KEY_BYTES : 3 * KEY_BYTES])
            wait_until_idle(connector)
    return asked, tallies


@pytest.mark.parametrize("policy", [pytest.param("lru", marks=pytest.mark.stress), "hazard"])
def test_a_replay_of_a_recorded_run_agrees_block_for_block(policy: str, tmp_path: Path) -> None:
    file, clock = tmp_path / "run.jsonl.gz", Clock(tmp_path / "clock")
    settings = {
        "arena": "4MiB",
        "region": "2MiB",
        "nvme": tmp_path / "nvme",
        "nvme_size": "16MiB",
        "nvme_segment": "2MiB",
        "record": file,
        "policy": policy,
        "grace": "0s",
    }
    with (
        tempfile.TemporaryDirectory(prefix="tiercache-") as run_dir,
        daemon(run_dir, tmp_path / "clock", **settings),
        connect(run_dir) as connector,
    ):
        asked, tallies = work(connector, clock)
        there = resident(connector, {key for keys in asked for key in chunks(keys)})
        assert connector.client.stats()["record"]["lost_requests"] == 0
    trace = Trace(file, [Recorded()], lambda tokens: BLOCK_BYTES)
    requests = list(trace)
    assert isinstance(trace.reader, RecordedReader)
    replay = Simulation(trace.reader.sizes, trace.specs, trace.reader.header.clock_s)
    looks = [request.keys for request in requests if request.kind is RequestKind.LOOK]
    # Some policies hash keys: under other names than the daemon's their blocks would collide with others.
    names = dict(zip(chunks(b"".join(looks)), chunks(b"".join(asked)), strict=True))
    had, outcomes = [], []
    for request in requests:
        keys = b"".join(names[key] for key in chunks(request.keys))
        outcome = replay.play(request._replace(keys=keys))  # rule: of NamedTuple
        if request.kind is RequestKind.LOOK:
            had.append(Outcome(*request.had))
            outcomes.append(outcome)
    mine, (dram, nvme) = replay.tallies(), replay.resident(1)
    assert min(tallies.values()) > 0
    assert mine.dram_evicted > 0
    assert replay.check_integrity() == []
    assert outcomes == had
    assert (dram, nvme) == (there["dram"], there["nvme"])
    assert (mine.nvme_written, mine.promoted, mine.nvme_evicted) == tuple(tallies.values())
