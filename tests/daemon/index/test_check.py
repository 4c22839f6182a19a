"""`check` in slices while the books change: it finds what is wrong, and nothing that is right."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from cache_rig import FRAME_BYTES, CacheRig, fill, in_slices
from chains import chain_of

from tiercache.daemon.index.check import ENTRIES
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.protocol.messages import KEY_BYTES, REGION_SHIFT

BLOCKS = 6 * ENTRIES


class Busy(CacheRig):
    """A full cache with frames of two sizes; each step makes a random request."""

    def __init__(self) -> None:
        super().__init__(
            regions=6, region_bytes=BLOCKS // 4 * FRAME_BYTES, quota={"t": BLOCKS // 2 * FRAME_BYTES}, pin_share=0.5
        )
        self.rng = random.Random(3)
        self.spaces = [self.space(), self.space(rank=1, tenant="t"), self.space(rank=2, window_blocks=600)]
        self.large = self.space(rank=3, block_bytes=2 * FRAME_BYTES)
        self.long = fill(self, self.spaces[0], 1, BLOCKS // 2)
        self.window = fill(self, self.spaces[2], 2, 700)
        self.leases: list[int] = []
        self.written: list[tuple[int, int]] = []
        self.owners = [self.owner, Owner(b"b" * 16)]

    def step(self) -> None:
        """A request or two of any kind."""
        self.now_s += 0.01
        rng, cache, reads = self.rng, self.cache, self.cache.reads
        for _ in range(3):
            namespace, keys = (
                rng.choice([*self.spaces, self.large]),
                chain_of(rng.randrange(4, 250), rng.randrange(1, 40)),
            )
            match rng.randrange(8):
                case 0 | 1 | 2:
                    got = cache.reserve(self.owner, namespace, b"", keys, 10)
                    if got.lease_id:
                        self.written.append((got.lease_id, len(got.states)))
                case 3:
                    found = cache.match(self.owner, [self.spaces[0]], self.long[: KEY_BYTES * rng.randrange(1, 999)], 5)
                    self.leases += [] if found.lease is None else [found.lease.lease_id]
                case 4:
                    found = cache.match(self.owner, [self.spaces[2]], self.window, 5)
                    self.leases += [] if found.lease is None else [found.lease.lease_id]
                case 5:
                    cache.pin([self.spaces[0]], self.long[: KEY_BYTES * rng.randrange(1, 99)], 0.05)
                case 6:
                    cache.flush_dram([namespace.number], rng.choice([keys[:KEY_BYTES], self.window[:KEY_BYTES]]))
                case 7 if rng.random() < 0.05:
                    cache.flush_dram([namespace.number], b"")
            if len(self.written) > 5:
                lease, blocks = self.written.pop(0)
                cache.writes.commit(self.owner, lease, range(rng.randrange(blocks + 1)))
                if rng.random() < 0.5:
                    cache.writes.abort(self.owner, lease, finished=True)
            if len(self.leases) > 5:
                reads.release(self.owner, self.leases.pop(rng.randrange(5)))
        cache.expire()
        cache.work()


def test_books_that_change_all_the_time_agree() -> None:
    h = Busy()
    for _ in range(4):
        findings, slices = in_slices(h.cache.check(), h.step)
        assert findings == []
        assert slices > BLOCKS // ENTRIES
    h.check()
    index, regions = h.cache.space.index, h.cache.space.allocator.classes[FRAME_BYTES].regions
    assert index.moved is None, "nothing is recorded for the check any more"
    assert all(region.seen is None for region in regions.values())


def _other_parent(h: Busy) -> None:
    index = h.cache.space.index
    index.parent[_deep(h)] = h.spaces[0].table.root


def _deep(h: Busy) -> int:
    return h.spaces[0].table.get(h.long[KEY_BYTES * 400 : KEY_BYTES * 401])


def _lost_key(h: Busy) -> None:
    index, entry = h.cache.space.index, _deep(h)
    index.key[entry] = bytes(KEY_BYTES)


def _children(h: Busy) -> None:
    h.cache.space.index.children[_deep(h)] += 1


def _pins(h: Busy) -> None:
    index = h.cache.space.index
    index.pins[_deep(h)] += 1


def _candidate(h: Busy) -> None:
    h.cache.space.index.columns.next[_deep(h)] = 1


def _frame_of_two(h: Busy) -> None:
    index = h.cache.space.index
    index.frame[_deep(h)] = index.frame[index.parent[_deep(h)]]


def _frame_lost(h: Busy) -> None:
    index = h.cache.space.index
    index.frame[_deep(h)] = -1


def _free_and_owned(h: Busy) -> None:
    """The frame of a block is given back although the block stays. At the bottom of the free list it is not taken."""
    allocator, frame = h.cache.space.allocator, h.cache.space.index.frame[_deep(h)]
    region = allocator.classes[FRAME_BYTES].regions[frame >> REGION_SHIFT]
    region.returned.insert(0, (frame & 0xFFFFFFFF) // FRAME_BYTES)


def _written_and_owned(h: Busy) -> None:
    got = h.cache.reserve(h.owner, h.spaces[0], b"", chain_of(255, 1), 100)
    [block] = h.cache.writes.leases[got.lease_id].blocks.values()
    block.frame = h.cache.space.index.frame[_deep(h)]


def _account(h: Busy) -> None:
    allocator, frame = h.cache.space.allocator, h.cache.space.index.frame[_deep(h)]
    region = allocator.classes[FRAME_BYTES].regions[frame >> REGION_SHIFT]
    account = h.cache.space.quotas.numbers["t"]
    if region.accounts is None:
        h.cache.space.allocator.account_bytes[account] += FRAME_BYTES
        return
    region.accounts[(frame & 0xFFFFFFFF) // FRAME_BYTES] = account


def _blocks(h: Busy) -> None:
    h.spaces[0].table.blocks += 1


def _held(h: Busy) -> None:
    h.cache.writes.unfinished._held["unknown"] += 4096


WRONG: dict[str, Callable[[Busy], None]] = {
    "is not among the children of": _other_parent,
    "is live but its key is not in its table": _lost_key,
    "children, has": _children,
    "pins, has": _pins,
    "a candidate, wrongly": _candidate,
    "it has two owners": _frame_of_two,
    "that have no owner": _frame_lost,
    "is free and owned": _free_and_owned,
    "has two owners": _written_and_owned,
    "account": _account,
    "namespace 1 counts": _blocks,
    "being written are not counted": _held,
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_found_while_others_are_served(text: str) -> None:
    h = Busy()
    # Nothing of this chain is evicted meanwhile, so that the fault stays what it is.
    assert h.cache.match(Owner(b"c" * 16), [h.spaces[0]], h.long[: KEY_BYTES * 500], 100).lease is not None
    WRONG[text](h)

    def read() -> None:
        found = h.cache.match(h.owner, [h.spaces[0]], h.long[: KEY_BYTES * h.rng.randrange(1, 300)], 5)
        assert found.lease is not None
        h.cache.reads.release(h.owner, found.lease.lease_id)
        h.store(h.spaces[2], chain_of(h.rng.randrange(4, 250), 3))

    findings, _ = in_slices(h.cache.check(), read)
    assert [finding for finding in findings if text in finding], findings
