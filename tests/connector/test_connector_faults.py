"""Real daemons are killed and stopped under a connector, which must survive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chains import chain_of
from connector_helpers import BLOCK_BYTES, bytes_of, spec
from waiting import hurried, state_of, wait_until

import tiercache
from tiercache.errors import DaemonUnavailable


@pytest.fixture
def own_daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch("32MiB", region="8MiB") as daemon:
        yield daemon


@pytest.fixture
def connector(own_daemon: tiercache.LaunchedDaemon) -> Iterator[tiercache.Connector]:
    pool = tiercache.Pool.from_blocks(np.random.default_rng(1).integers(0, 256, (32, BLOCK_BYTES), np.uint8))
    with tiercache.connect(own_daemon.address, namespace=spec(), pool=pool, required=True) as connector:
        yield connector


def test_a_killed_daemon_is_a_miss_and_its_successor_a_hit(
    own_daemon: tiercache.LaunchedDaemon, connector: tiercache.Connector
) -> None:
    chain = chain_of("killed", 8)
    assert connector.store(chain, range(8)).stored == 8
    held = connector.match(chain)
    former = connector.client.session()
    assert former.arena is not None
    os.kill(own_daemon.pid, signal.SIGKILL)
    wait_until(lambda: not connector.available)
    assert connector.load(held, range(10, 18)) == 0
    assert connector.match(chain).blocks == 0
    assert connector.store(chain, range(8)) == (0, 0, 8, False)
    assert former.arena.wait_unmapped(40)  # else its memory would live on here
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
    chains = [chain_of(f"load {number}", 4) for number in range(4)]
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
            thread.join(40)
        connector.close()
        daemon.close()
    assert problems == []
    assert not any(thread.is_alive() for thread in threads)


def test_a_stopped_daemon_costs_one_deadline_and_keeps_its_session(
    own_daemon: tiercache.LaunchedDaemon, connector: tiercache.Connector
) -> None:
    chain = chain_of("stopped", 4)
    connector.store(chain, range(4))
    held = connector.match(chain)
    session = connector.client.session()
    os.kill(own_daemon.pid, signal.SIGSTOP)
    try:
        with hurried(connector.client):
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
        "from tiercache.protocol.messages import Reserve\n"
        "spec = tiercache.NamespaceSpec(\n"
        "    engine='test/1', layout='x', dtype='uint8', block_size=4, block_bytes=5000)\n"
        "client = tiercache.Client.connect(sys.argv[1], request_timeout_s=10)\n"
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


def test_a_launched_daemon_ends_with_its_parent_and_leaves_nothing() -> None:
    code = (
        "import os, tiercache\n"
        "daemon = tiercache.launch('16MiB')\n"
        "print(daemon.pid, daemon.address, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    pid, address = done.stdout.split()
    wait_until(lambda: state_of(pid) in ("", "Z"))
    assert not Path(address).exists()


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


def test_a_forked_child_connects_anew_and_the_parent_goes_on(
    own_daemon: tiercache.LaunchedDaemon, connector: tiercache.Connector
) -> None:
    chain = chain_of("forked", 4)
    connector.store(chain, range(4))
    pid = os.fork()
    if pid == 0:
        try:
            assert connector.match(chain).blocks == 0
            with tiercache.connect(own_daemon.address, namespace=spec(), pool=connector.pool, required=True) as own:
                assert own.load(own.match(chain), range(10, 14)) == 4
                assert bytes_of(own, list(range(10, 14))) == bytes_of(own, list(range(4)))
            os._exit(7)
        finally:
            os._exit(9)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert connector.load(connector.match(chain), range(10, 14)) == 4
    assert own_daemon.poll() is None


def test_a_session_is_over_for_the_daemon_when_the_parent_of_a_fork_dies(
    own_daemon: tiercache.LaunchedDaemon, connector: tiercache.Connector
) -> None:
    """The child must not keep the parent's session socket open."""
    code = (
        "import os, sys, time, tiercache\n"
        "client = tiercache.Client.connect(sys.argv[1], name='parent', request_timeout_s=10)\n"
        "if os.fork() == 0:\n"
        "    print('forked', flush=True)\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code, own_daemon.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline() == b"forked\n"

        def names() -> list[str]:
            return [session["name"] for session in connector.stats()["daemon"]["sessions"]]

        wait_until(lambda: "parent" not in names())
        parent.stdin.close()
