"""Real daemons that are killed and stopped under a connector that must not mind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import BLOCK_BYTES, bytes_of, keys

import tiercache
from tiercache.errors import DaemonUnavailable

pytestmark = pytest.mark.faults
DEADLINE_S = 0.3


@pytest.fixture
def own_daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch("32MiB", region="8MiB") as daemon:
        yield daemon


@pytest.fixture
def connector(own_daemon: tiercache.LaunchedDaemon) -> Iterator[tiercache.Connector]:
    pool = tiercache.Pool.from_blocks(np.random.default_rng(1).integers(0, 256, (32, BLOCK_BYTES), np.uint8))
    spec = tiercache.NamespaceSpec(
        engine="test/1", layout="x", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES
    )
    with tiercache.connect(
        own_daemon.address, namespace=spec, pool=pool, required=True, request_timeout_s=DEADLINE_S
    ) as connector:
        yield connector


def wait_until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        threading.Event().wait(0.005)


def test_a_killed_daemon_is_a_miss_and_its_successor_a_hit(
    own_daemon: tiercache.LaunchedDaemon, connector: tiercache.Connector
) -> None:
    chain = keys("killed", 8)
    assert connector.store(chain, range(8)).stored == 8
    held = connector.match(chain)
    former = connector.client.session()
    assert former.arena is not None
    os.kill(own_daemon.pid, signal.SIGKILL)
    wait_until(lambda: not connector.available)
    assert connector.load(held, range(10, 18)) == 0
    assert connector.match(chain).blocks == 0
    assert connector.store(chain, range(8)) == (0, 0, 8, False)
    assert former.arena.wait_unmapped(5)  # else its memory would live on here
    with tiercache.launch("32MiB", region="8MiB", run_dir=own_daemon.address):
        wait_until(lambda: connector.available)
        assert connector.match(chain).blocks == 0
        assert connector.store(chain, range(8)).stored == 8
        assert connector.load(connector.match(chain), range(10, 18)) == 8
        assert bytes_of(connector, list(range(10, 18))) == bytes_of(connector, list(range(8)))
        connector.close()


def test_killed_under_load_nothing_raises_hangs_or_is_wrong(
    own_daemon: tiercache.LaunchedDaemon, connector: tiercache.Connector
) -> None:
    """Several threads store and load while the daemon is killed and replaced, again and again."""
    assert connector.pool is not None
    chains = [keys(f"load {number}", 4) for number in range(4)]
    expected = [bytes_of(connector, list(range(number * 4, number * 4 + 4))) for number in range(4)]
    stop = threading.Event()
    problems: list[str] = []
    hits = [0] * 4

    def work(number: int) -> None:
        source = range(number * 4, number * 4 + 4)
        target = range(16 + number * 4, 20 + number * 4)
        try:
            while not stop.is_set():
                connector.store(chains[number], source)
                good = connector.load(connector.match(chains[number]), target)
                if bytes_of(connector, list(target)[:good]) != expected[number][:good]:
                    problems.append(f"wrong bytes in thread {number}")
                hits[number] += good == 4
        except BaseException as error:
            problems.append(repr(error))
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    daemon = own_daemon
    try:
        for _ in range(3):
            hits[:] = [0] * 4
            wait_until(lambda: min(hits) > 3)
            os.kill(daemon.pid, signal.SIGKILL)
            wait_until(lambda: not connector.available)
            daemon = tiercache.launch("32MiB", region="8MiB", run_dir=own_daemon.address)
        hits[:] = [0] * 4
        wait_until(lambda: min(hits) > 3)
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
        connector.close()
        daemon.close()
    assert problems == []
    assert not any(thread.is_alive() for thread in threads)


def test_a_stopped_daemon_costs_one_deadline_and_keeps_its_session(
    own_daemon: tiercache.LaunchedDaemon, connector: tiercache.Connector
) -> None:
    chain = keys("stopped", 4)
    connector.store(chain, range(4))
    held = connector.match(chain)
    session = connector.client.session()
    os.kill(own_daemon.pid, signal.SIGSTOP)
    try:
        assert connector.match(chain).blocks == 0
        assert not connector.available
        asked = connector.counters["failures"]
        for _ in range(1000):  # at once: none of these waits for a deadline
            assert connector.match(chain).blocks == 0
        assert connector.counters["failures"] == asked
        assert connector.load(held, range(10, 14)) == 0
    finally:
        os.kill(own_daemon.pid, signal.SIGCONT)
    wait_until(lambda: connector.available)
    assert connector.client.session() is session
    assert connector.load(connector.match(chain), range(10, 14)) == 4
    # What was granted late, and the lease that could not be released, have been given back.
    wait_until(lambda: connector.stats()["daemon"]["leases"]["read"] == 0)


def test_a_client_that_dies_leaves_nothing_behind(
    own_daemon: tiercache.LaunchedDaemon, connector: tiercache.Connector
) -> None:
    code = (
        "import os, sys, numpy as np, tiercache\n"
        "from tiercache.messages import Reserve\n"
        "spec = tiercache.NamespaceSpec(engine='test/1', layout='x', dtype='uint8', block_size=4, block_bytes=5000)\n"
        "client = tiercache.Client.connect(sys.argv[1])\n"
        "number = client.register(spec)\n"
        "reserved = client.call(Reserve, namespace=number, parent=b'', keys=bytes(64), ttl_ms=60000)\n"
        "print(reserved.lease != 0, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, own_daemon.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"True\n"
        assert connector.stats()["daemon"]["leases"]["write"] == 1
        child.kill()
        child.stdout.close()
        child.stdin.close()
    wait_until(lambda: connector.stats()["daemon"]["leases"]["write"] == 0)
    wait_until(lambda: connector.stats()["daemon"]["arena"]["quarantined_bytes"] == 0)


def test_a_launched_daemon_ends_with_its_parent() -> None:
    code = (
        "import os, tiercache\n"
        "daemon = tiercache.launch('16MiB')\n"
        "print(daemon.pid, daemon.address, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    pid, address = done.stdout.split()
    pidfd_gone = Path(f"/proc/{pid}")
    wait_until(lambda: not pidfd_gone.exists() or "Z" in (pidfd_gone / "stat").read_text().split()[2])
    for path in Path(address).iterdir():
        path.unlink()
    Path(address).rmdir()


def test_a_daemon_that_cannot_start_says_why() -> None:
    with pytest.raises(DaemonUnavailable, match=r"ended with status 2(.|\n)*arena"):
        tiercache.launch("a lot")
    with pytest.raises(DaemonUnavailable, match=r"status 2(.|\n)*--no-such"):
        tiercache.launch("16MiB", no_such="1")


def test_closing_a_launched_daemon_removes_its_directory() -> None:
    daemon = tiercache.launch("16MiB")
    assert Path(daemon.address).stat().st_mode & 0o777 == 0o700
    assert daemon.poll() is None
    daemon.close()
    daemon.close()
    assert daemon.poll() == 0
    assert not Path(daemon.address).exists()
