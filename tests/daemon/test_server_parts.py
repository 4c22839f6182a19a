"""The work of the daemon's loop besides requests: ticks, signals, and notifications to systemd."""

from __future__ import annotations

import math
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.daemon.server import _MAX_UNDRAINED_TICKS, Server, _notify_systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_wherever_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"tiercache-{secrets.token_hex(8)}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        _notify_systemd("READY=1")
        assert listener.recv(100, socket.MSG_DONTWAIT) == b"READY=1"


def test_a_queue_that_never_runs_empty_does_not_keep_leases_alive() -> None:
    """Queued requests may renew leases, so leases do not expire while the queue is not empty; but not for ever."""
    expired = 0

    def expire() -> None:
        nonlocal expired
        expired += 1

    def nothing(*arguments: object) -> None: ...

    drained = False
    counters = SimpleNamespace(requests=0, loop_stalls=0)
    fake: Any = SimpleNamespace(
        _stopping=SimpleNamespace(is_set=lambda: False),
        clock=SimpleNamespace(observe=lambda slept_s: 0.0, stalls=0),
        cache=SimpleNamespace(counters=counters, expire=expire),
        loop=SimpleNamespace(call_later=nothing),
        service=SimpleNamespace(reads=SimpleNamespace(parked=[], answer_parked=nothing)),
        events=None,
        remote=None,
        router=SimpleNamespace(tick=nothing),
        _drain=lambda limit: drained,
        _undrained_ticks=0,
        _requests_seen=0,
        _idle_from_s=0.0,
        _idle_tick_s=0.05,
        _health_log=SimpleNamespace(next_s=math.inf),
        _working=True,
        _tick=nothing,
    )
    for _ in range(2 * _MAX_UNDRAINED_TICKS):
        Server._tick(fake)
    assert expired == 2
    drained = True
    Server._tick(fake)
    assert expired == 3


def test_work_goes_on_after_a_part_of_it_has_failed() -> None:
    later: list[object] = []
    fails = True

    def answer_parked() -> bool:
        if fails:
            raise IndexError
        return False

    fake: Any = SimpleNamespace(
        _working=True,
        _serving=True,
        _over=False,
        cache=SimpleNamespace(work=lambda: True),
        _later=later.append,
        _work=None,
        service=SimpleNamespace(reads=SimpleNamespace(answer_parked=answer_parked)),
    )
    with pytest.raises(IndexError):
        Server._work(fake)
    assert not fake._working, "the next tick tries again"
    fails = False
    Server._work(fake)
    assert (fake._working, later) == (True, [None])
    fake._over = True  # the sockets close
    Server._work(fake)
    assert (fake._working, later) == (False, [None])


_FIRST = """
import random, sys, time
import tiercache.daemon.server
from tiercache.daemon.cache import Cache, CacheLimits
from tiercache.daemon.ground.slices import finish
from tiercache.daemon.policies import POLICIES
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.protocol.namespaces import NamespaceSpec

now_s = 0.0
cache, owner = Cache(lambda: now_s, CacheLimits(policy="hazard")), Owner(bytes(16))
cache.space.allocator.add_region(0, 64 << 20)
space = cache.space.open_namespace(NamespaceSpec(engine="e", layout="l", dtype="uint8", block_size=1, block_bytes=4096))
before = set(sys.modules)
for number in range(50):
    now_s += 1.0
    keys = random.Random(number).randbytes(16 * 512)
    got = cache.writes.reserve(owner, space, b"", keys, 10)
    cache.writes.commit(owner, got.lease_id, range(512))
    for _ in range(3):
        assert finish(cache.reads.match(owner, [space], keys, 10)).dram
    cache.expire()
    while cache.work():
        pass
print(*sorted(set(sys.modules) - before))
"""


def test_first_requests_import_nothing() -> None:
    """The first requests of a daemon's life are answered as fast as any."""
    done = subprocess.run([sys.executable, "-c", _FIRST], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
