"""Hit rates of caches of other sizes: against caches of these sizes, and each bound of the estimate."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from math import inf
from pathlib import Path
from types import ModuleType

import pytest
from cache_at_once import CacheAtOnce

from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.observe import reuse
from tiercache.daemon.observe.reuse import WhatIf, windowed
from tiercache.daemon.observe.reuse_curve import SLICE_S
from tiercache.daemon.observe.reuse_stack import MAX_SHIFT, NAME_START, chosen, is_chosen, marks
from tiercache.daemon.policies import Policies
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.protocol.messages import KEY_BYTES, BlockState
from tiercache.protocol.namespaces import NamespaceSpec

BENCH = Path(__file__).resolve().parents[3] / "bench"
BLOCK = 4096
POINTS = 0.02


@pytest.fixture(scope="module")
def traces() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import traces

        yield traces
        sys.modules.pop("traces", None)


def spec(**changed: int) -> NamespaceSpec:
    fields: dict[str, int] = {"block_bytes": BLOCK, "tp_size": 8, **changed}
    return NamespaceSpec(engine="t", layout="l", dtype="u8", block_size=1, **fields)  # type: ignore[arg-type]


class Harness:
    """An estimate, a clock that is a field, and some namespaces."""

    def __init__(self, dram_blocks: int = 64, below_blocks: int = 0, max_samples: int = reuse.MAX_SAMPLES) -> None:
        self.now_s = 0.0
        self.what_if = WhatIf(lambda: self.now_s, dram_blocks * BLOCK, below_blocks * BLOCK, max_samples)
        self.places = Space(Policies("lru", time.monotonic), Counters())
        self.space = self.open()

    def open(self, **changed: int) -> Namespace:
        return self.places.open_namespace(spec(**changed))

    def ask(self, keys: bytes, dram: int = 0, below: int = 0, spaces: Sequence[Namespace] = ()) -> None:
        self.what_if.looked_up(spaces or [self.space], keys, dram, below)
        self.check()

    def store(self, keys: bytes, parent: bytes = b"", space: Namespace | None = None) -> None:
        self.what_if.stored(space or self.space, parent, keys)
        self.check()

    def rates(self, *blocks: int) -> list[float]:
        """Hit rates at these sizes in blocks, plus half a block, so that each is just inside its step of the scale."""
        sizes = [size * BLOCK + BLOCK // 2 for size in blocks]
        return [round(rate, 9) for rate in self.what_if.lookups.hit_rates(sizes)]

    def check(self) -> None:
        assert self.what_if.stack.check_integrity() == []


def keys_of(tag: int, count: int, first: int = 0) -> bytes:
    chance = random.Random(tag)
    return b"".join(chance.randbytes(16) for _ in range(first + count))[first * 16 :]


# --- against caches of that size -----------------------------------------------------------------


def real_hits(trace: Sequence[bytes], blocks: int, what_if: WhatIf | None = None) -> int:
    """Blocks that the daemon's own cache finds at that size, if all that is asked for is stored."""
    cache = CacheAtOnce(lambda: 0.0, what_if=what_if)
    cache.space.allocator.add_region(0, blocks * BLOCK)
    namespace, owner = cache.space.open_namespace(spec()), Owner(b"a" * 16)
    for keys in trace:
        found = cache.match(owner, [namespace], keys, 0.0).dram
        parent = keys[(found - 1) * 16 : found * 16] if found else b""
        if found * 16 < len(keys):
            got = cache.reserve(owner, namespace, parent, keys[found * 16 :], 10)
            cache.writes.commit(owner, got.lease_id, [i for i, one in enumerate(got.states) if one is BlockState.FRAME])
    assert cache.check_integrity() == []
    return cache.counters.match_blocks_hit


def test_the_estimate_of_one_cache_is_what_caches_of_other_sizes_find(traces: ModuleType) -> None:
    requests = traces.made_up_trace(seed=1, requests=500)
    keys = traces.block_keys(1)
    played = [keys(request.blocks) for request in requests]
    asked, unique = sum(traces.asked_blocks(requests)), traces.unique_blocks(requests)
    sizes = [unique * percent // 100 for percent in (8, 12, 20, 40)]
    seconds = count()  # a bound on work in every ten of them is not reached
    what_if = WhatIf(lambda: float(next(seconds)), sizes[1] * BLOCK)
    true = [real_hits(played, size, what_if if size == sizes[1] else None) / asked for size in sizes]
    assert true == [traces.lru_hits(requests, size) / asked for size in sizes]
    found = what_if.lookups.hit_rates([size * BLOCK for size in sizes])
    assert found == pytest.approx(true, abs=POINTS)
    assert true[3] - true[0] > 5 * POINTS  # else any estimate would pass
    stats = what_if.stats()
    assert (stats["accessed_blocks"], stats["hit_rate"]) == (asked, pytest.approx(true[1]))
    assert [one["capacity_bytes"] for one in stats["curve"]] == [int(sizes[1] * BLOCK * 2**n) for n in range(-3, 4)]


# --- distances -----------------------------------------------------------------------------------


def test_a_window_needs_its_last_blocks() -> None:
    assert windowed([0, 1, 2, 3], [5, 9, 1, 2], window=2) == [2, 2, 2, 2]
    assert windowed([0, 1, 2, 3], [1, inf, 1, 2], window=2) == [1, 2, 2, 2]
    assert windowed([0, 1, 2, 3], [1, 2, 3, inf], window=4) == [1, 2, 3, inf]
    h = Harness()
    window = h.open(window_blocks=2)
    keys = keys_of(1, 6)
    h.store(keys[32:], space=window)  # blocks 2 .. 5: the first two have left the window long ago
    h.ask(keys, dram=6, spaces=[window])
    assert h.rates(1, 2, 3) == [0, 1, 1]
    h.ask(keys, spaces=[h.space, window])
    assert h.rates(1000) == [0.5]  # with a namespace beside that needs all: nothing


# --- bounds --------------------------------------------------------------------------------------


def test_keys_that_are_no_hashes_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rate is low enough for them: they are not in the sample, which stays as it is."""
    h, looked = Harness(dram_blocks=1000), list[int]()
    real = reuse.chosen

    def listed(keys: bytes, shift: int) -> list[int]:
        looked.append(len(keys))
        return real(keys, shift)

    monkeypatch.setattr(reuse, "chosen", listed)
    h.store(keys_of(1, 50))
    h.what_if.looked_up([h.space] * 64, bytes(KEY_BYTES * 65_536), 0, 0)
    h.ask(keys_of(1, 50))
    assert (h.what_if.stack.shift, len(h.what_if.stack)) == (0, 50)
    assert looked == [KEY_BYTES * 50] * 2, "the positions of such keys are not even listed"


def test_keys_are_marked_as_the_sample_chooses_them() -> None:
    keys = keys_of(7, 3000) + bytes(8) + b"\0\1" + bytes(6)
    for shift in range(MAX_SHIFT + 1):
        each = [is_chosen(keys[at + NAME_START :][:2], shift) for at in range(0, len(keys), KEY_BYTES)]
        assert list(marks(keys, shift)) == each
        assert chosen(keys, shift) == [at for at, one in enumerate(each) if one]


def test_too_much_work_halves_the_rate_and_a_quiet_time_doubles_it() -> None:
    h = Harness(dram_blocks=1000)
    keys, few = keys_of(1, 500), keys_of(1, 50)
    for _ in range(50):  # 25,000 at one instant
        h.what_if.stored(h.space, b"", keys)
    assert h.what_if.stack.shift == 1
    h.now_s += SLICE_S
    h.ask(few)  # still so much work in that slice
    assert h.what_if.stack.shift == 1
    h.now_s += SLICE_S
    h.ask(few)
    assert h.what_if.stack.shift == 0
    assert h.what_if.stats()["sample_rate"] == 0.5  # blocks that have just joined the sample have no past yet
    h.store(few)
    h.now_s += SLICE_S
    h.ask(few)
    assert h.what_if.stats()["sample_rate"] == 1
