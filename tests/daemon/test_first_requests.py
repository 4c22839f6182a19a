"""The first requests of a daemon's life are answered as fast as any: nothing is imported for them."""

from __future__ import annotations

import subprocess
import sys

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
    done = subprocess.run([sys.executable, "-c", _FIRST], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
