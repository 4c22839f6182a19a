"""`check` in slices while the books change: it finds what is wrong, and nothing that is right."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from cache_rig import FRAME_BYTES, CacheRig, fill, in_slices
from chains import chain_of

from tiercache.daemon.index import check
from tiercache.daemon.index.check import ENTRIES
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.protocol.messages import KEY_BYTES, REGION_SHIFT

BLOCKS = 6 * ENTRIES


class Filled(CacheRig):
    """A cache with frames of two sizes, a long chain and a window."""

    def __init__(self) -> None:
        super().__init__(
            regions=6, region_bytes=BLOCKS // 4 * FRAME_BYTES, quota={"t": BLOCKS // 2 * FRAME_BYTES}, pin_share=0.5
        )
        self.spaces = [self.space(), self.space(rank=1, tenant="t"), self.space(rank=2, window_blocks=600)]
        self.long = fill(self, self.spaces[0], 1, BLOCKS // 2)
        fill(self, self.spaces[2], 2, 700)
        self.store(self.space(rank=3, block_bytes=2 * FRAME_BYTES), chain_of(3, 10))


def _other_parent(h: Filled) -> None:
    index = h.cache.space.index
    index.parent[_deep(h)] = h.spaces[0].table.root


def _deep(h: Filled) -> int:
    return h.spaces[0].table.get(h.long[KEY_BYTES * 400 : KEY_BYTES * 401])


def _lost_key(h: Filled) -> None:
    index, entry = h.cache.space.index, _deep(h)
    index.key[entry] = bytes(KEY_BYTES)


def _children(h: Filled) -> None:
    h.cache.space.index.children[_deep(h)] += 1


def _pins(h: Filled) -> None:
    index = h.cache.space.index
    index.pins[_deep(h)] += 1


def _candidate(h: Filled) -> None:
    h.cache.space.index.columns.next[_deep(h)] = 1


def _frame_of_two(h: Filled) -> None:
    index = h.cache.space.index
    index.frame[_deep(h)] = index.frame[index.parent[_deep(h)]]


def _frame_lost(h: Filled) -> None:
    index = h.cache.space.index
    index.frame[_deep(h)] = -1


def _free_and_owned(h: Filled) -> None:
    """The frame of a block is given back although the block stays. At the bottom of the free list it is not taken."""
    allocator, frame = h.cache.space.allocator, h.cache.space.index.frame[_deep(h)]
    region = allocator.classes[FRAME_BYTES].regions[frame >> REGION_SHIFT]
    region.returned.insert(0, (frame & 0xFFFFFFFF) // FRAME_BYTES)


def _written_and_owned(h: Filled) -> None:
    got = h.cache.reserve(h.owner, h.spaces[0], b"", chain_of(255, 1), 100)
    [run] = h.cache.writes.leases[got.lease_id].blocks.values()
    run.frames = [h.cache.space.index.frame[_deep(h)]]


def _account(h: Filled) -> None:
    allocator, frame = h.cache.space.allocator, h.cache.space.index.frame[_deep(h)]
    region = allocator.classes[FRAME_BYTES].regions[frame >> REGION_SHIFT]
    account = h.cache.space.quotas.numbers["t"]
    if region.accounts is None:
        h.cache.space.allocator.account_bytes[account] += FRAME_BYTES
        return
    region.accounts[(frame & 0xFFFFFFFF) // FRAME_BYTES] = account


def _blocks(h: Filled) -> None:
    h.spaces[0].table.blocks += 1


def _frames_of_class(h: Filled) -> None:
    h.cache.space.allocator.classes[FRAME_BYTES].frames += 1


def _held(h: Filled) -> None:
    h.cache.writes.unfinished._held["unknown"] += 4096


WRONG: dict[str, Callable[[Filled], None]] = {
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
    "frames free, has": _frames_of_class,
    "being written are not counted": _held,
}


def served(h: Filled) -> list[str]:
    """The findings of a check, while others read and store between its slices."""
    rng, leases = random.Random(3), list[int]()

    def serve() -> None:
        found = h.cache.match(h.owner, [h.spaces[0]], h.long[: KEY_BYTES * rng.randrange(1, 300)], 5)
        assert found.lease is not None
        leases.append(found.lease.lease_id)
        if len(leases) > 5:
            h.cache.reads.release(h.owner, leases.pop(rng.randrange(5)))
        h.store(h.spaces[2], chain_of(rng.randrange(4, 250), 3))

    findings: list[str] = in_slices(h.cache.check(), serve)[0]
    return findings


def test_books_that_change_all_the_time_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ENTRIES", 4)
    h = Filled()
    assert served(h) == []
    index, regions = h.cache.space.index, h.cache.space.allocator.classes[FRAME_BYTES].regions
    assert index.moved is None, "nothing is recorded for the check any more"
    assert all(region.seen is None for region in regions.values())


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_found_while_others_are_served(text: str) -> None:
    h = Filled()
    # Nothing of this chain is evicted meanwhile, so that the fault stays what it is.
    assert h.cache.match(Owner(b"c" * 16), [h.spaces[0]], h.long[: KEY_BYTES * 500], 100).lease is not None
    WRONG[text](h)
    findings = served(h)
    assert [finding for finding in findings if text in finding], findings
