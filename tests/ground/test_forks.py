"""A forked child has its parent's objects but not its threads: it gets an error at once, and disturbs no client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import chain_of
from connector_helpers import BLOCK_BYTES, spec
from waiting import state_of, wait_until

import tiercache
from tiercache.errors import DaemonUnavailable
from tiercache.ground import forks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
ROOT = Path(__file__).resolve().parents[2]
HANG_S = 60
"""A child that takes longer is killed by its alarm."""


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child; fails where it raises or hangs."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(HANG_S)
        try:
            said = {"value": work()}
        except Exception as error:  # noqa: BLE001 - told to the parent, which fails
            said = {"error": repr(error)}
        os.write(write_end, json.dumps(said).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the child ended with {status}: it hung"
    said = json.loads(answer)
    assert "error" not in said, said
    return said["value"]


class LocksHeld:
    """Another thread holds all locks that a child must renew."""

    def __enter__(self) -> LocksHeld:
        self._locks: list[Any] = []
        for item, names in list(forks._watched.items()):
            for name in names:
                lock = getattr(item, name)
                if not isinstance(lock, threading.Condition):  # one has the lock that is named before it
                    self._locks.append(lock._cond if isinstance(lock, threading.Event) else lock)
        assert len(self._locks) > 8
        held, self._end = threading.Event(), threading.Event()

        def hold() -> None:
            for lock in self._locks:
                assert lock.acquire(timeout=HANG_S)
            held.set()
            self._end.wait(HANG_S)
            for lock in self._locks:
                lock.release()

        self._thread = threading.Thread(target=hold)
        self._thread.start()
        assert held.wait(HANG_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def reason(call: Callable[[], object]) -> str:
    with pytest.raises(DaemonUnavailable) as caught:
        call()
    return str(caught.value)


def test_a_child_gets_misses_and_reasons_whatever_lock_was_held(
    daemon: tiercache.LaunchedDaemon, open_connector: Callable[..., tiercache.Connector]
) -> None:
    connector = open_connector()
    sibling_pool = tiercache.Pool.from_blocks(np.zeros((4, BLOCK_BYTES), np.uint8))
    sibling = connector.sibling(spec(group="sibling"), sibling_pool)
    chain, other = chain_of("fork", 4), chain_of("fork, not stored", 4)
    assert connector.store(chain, range(4)).stored == 4
    match = connector.match(chain)
    assert connector.load_async(connector.match(chain), range(8, 12)).result() == 4  # the queues have their threads
    ticket = match.ticket()
    session = connector.client.session()

    def misuse() -> dict[str, object]:
        return {
            "available": connector.available,
            "match": connector.match(chain).blocks,
            "adopt": connector.adopt(ticket).blocks,
            "load": connector.load(match, range(8, 12)),
            "load_async": connector.load_async(match, range(8, 12)).result(HANG_S),
            "store": connector.store(other, range(4)),
            "store_async": sibling.store_async(other, range(4)).result(HANG_S),
            "prefetch": connector.prefetch(chain),
            "hint": connector.hint_async(chain, tiercache.Hint(done=True)).result(HANG_S),
            "pin": connector.pin(chain, 60),
            "flush": reason(connector.flush),
            "ping": reason(connector.client.ping),
            "held session": reason(lambda: session.namespace_id(spec(group="new"))),
            "unavailable": connector.counters["unavailable"] - before,
            "close": [one.close() for one in (connector, sibling)],
        }

    def anew() -> list[int]:
        pool = tiercache.Pool.from_blocks(np.zeros((8, BLOCK_BYTES), np.uint8))
        with tiercache.connect(daemon.address, namespace=spec(), pool=pool, required=True) as own:
            return [own.load(own.match(chain), range(4)), own.store(chain_of("of the child", 2), [4, 5]).stored]

    before = connector.counters["unavailable"]
    with LocksHeld():
        seen = in_child(misuse)
        loaded = in_child(anew)
    for name in ("flush", "ping", "held session"):
        assert forks.FORKED in seen.pop(name), name
    assert seen == {
        "available": False,
        "match": 0,
        "adopt": 0,
        "load": 0,
        "load_async": 0,
        "store": [0, 0, 4, False],
        "store_async": [0, 0, 4, False],
        "prefetch": 0,
        "hint": 0,
        "pin": 0,
        "unavailable": 3,
        "close": [None, None],
    }
    assert loaded == [4, 2], "a connection of the child's own serves it"
    # And the parent has not noticed: the same session, the same leases.
    assert connector.client.session() is session
    assert connector.load(match, range(8, 12)) == 4
    assert (connector.counters["times_up"], connector.counters["times_down"]) == (1, 0)


def test_a_child_ends_no_daemon_and_a_daemon_outlives_no_parent(tmp_path: Path) -> None:
    """The child has no copy of the pipe that keeps the daemon alive, and cannot kill, restart or close the daemon."""
    code = (
        "import os, sys, time, tiercache\n"
        "daemon = tiercache.launch('2MiB')\n"
        "if os.fork() == 0:\n"
        "    daemon.kill()\n"
        "    daemon.close()\n"
        "    print(daemon.pid, os.getpid(), daemon.answers(60), flush=True)\n"
        "    os.close(1)\n"
        "    time.sleep(120)\n"
        "    os._exit(0)\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    daemon_pid, child_pid, answered = parent.stdout.readline().split()
    try:
        assert answered == "True"
        parent.communicate(timeout=60)
        wait_until(lambda: state_of(daemon_pid) in ("", "Z"))
        assert state_of(child_pid) not in ("", "Z"), "while the child lives"
    finally:
        os.kill(int(child_pid), signal.SIGKILL)


EXCEPT = {
    "tiercache/connector/jobs.py: _done",  # of a transfer: its queue forgets it
    "tiercache/copies/memcpy.py: _begun",  # of one copy, which its own thread waits for
    "tiercache/copies/memcpy.py: _helped",
    "tiercache/connector/direct/transfers.py: _changed",  # the same
    "connectors/transformers_cache.py: _lock",  # taken only while the connector is available
    "tiercache/connector/direct/backend.py: _lock",  # of a backend for tests
    "tiercache/connector/direct/backend.py: _resume",
}


def test_every_lock_is_renewed_in_a_child() -> None:
    left = set()
    for folder in ("tiercache/client", "tiercache/connector", "tiercache/copies", "tiercache/ground", "connectors"):
        paths = sorted((ROOT / folder).rglob("*.py"))
        assert len(paths) > 1, folder
        for path in paths:
            text = path.read_text()
            watched = re.findall(r'forks\.watch\(self((?:, "\w+")*)\)', text)
            names = {name for found in watched for name in re.findall(r'"(\w+)"', found)}
            made = set(re.findall(r"self\.(\w+) = threading\.(?:Lock|RLock|Condition|Event|Semaphore)\(", text))
            left |= {f"{path.relative_to(ROOT)}: {name}" for name in made - names}
            if re.search(r"^_\w+ = threading\.", text, re.MULTILINE):
                assert "@forks.in_child" in text, f"{path} has a lock of its module that a forked child must renew"
    assert left - EXCEPT == set(), "use forks.watch"
