"""A tenant at its quota makes room among its own blocks, and no other tenant loses a block."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from cache_at_once import CacheAtOnce
from chains import chain_of, key_of
from tenant_cache import FRAME, found, make_cache, open_for, store

from tiercache.config.daemon_config import load_config
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.quotas import Quotas
from tiercache.daemon.tiers.dram.space import MAX_TENANT_NAMESPACES, Namespace, NoRoom
from tiercache.errors import ConfigError
from tiercache.protocol.namespaces import NamespaceSpec

REGION = 16 * FRAME


def test_a_full_arena_evicts_the_oldest_block_of_any_account() -> None:
    cache = make_cache(16, a=12)
    a, b = open_for(cache, "a"), open_for(cache, "")
    assert store(cache, a, chain_of("a", 8)) == 8
    assert store(cache, b, chain_of("b", 8)) == 8
    assert store(cache, b, chain_of("b2", 4)) == 4
    assert (found(cache, a, chain_of("a", 8)), found(cache, b, chain_of("b", 8))) == (4, 8)
    # And below its quota a tenant takes from others what is older than its own.
    assert found(cache, a, chain_of("a", 8)) == 4
    assert store(cache, a, chain_of("a2", 6)) == 6
    assert found(cache, a, chain_of("a2", 6)) == 6
    assert (found(cache, b, chain_of("b2", 4)), found(cache, b, chain_of("b", 8))) == (4, 2), (
        "b2 was stored just before"
    )


def test_two_accounts_lose_no_more_blocks_than_are_needed() -> None:
    cache = make_cache(16, a=12)
    a, b = open_for(cache, "a"), open_for(cache, "")
    assert (store(cache, a, chain_of("a", 3)), store(cache, b, chain_of("b", 13))) == (3, 13)
    assert store(cache, b, chain_of("b2", 4)) == 4
    assert (found(cache, a, chain_of("a", 3)), found(cache, b, chain_of("b", 13))) == (0, 12)


def test_a_tenant_evicts_more_while_what_it_lost_is_still_being_sent() -> None:
    """It counts for the tenant until then, to a shared store or to a disk that hangs."""
    cache = make_cache(64, a=8)
    a, b = open_for(cache, "a"), open_for(cache, "")
    x = chain_of("x", 8)
    assert (store(cache, a, x), store(cache, b, chain_of("b", 8))) == (8, 8)
    sent = [cache.space.index.frame[a.table.get(x[16 * place : 16 * place + 16])] for place in (5, 6, 7)]
    cache.space.allocator.hold_many(sent)
    assert store(cache, a, chain_of("y", 1)) == 1
    assert found(cache, a, x) == 4, "three that are sent, and one that makes room"
    assert store(cache, a, chain_of("z", 2)) == 2, "nothing has been sent meanwhile"
    assert cache.space.used_bytes("a") == 8 * FRAME
    cache.space.allocator.unhold_many(sent)
    assert cache.space.used_bytes("a") == 5 * FRAME
    assert (found(cache, b, chain_of("b", 8)), cache.space.quotas.refused.total()) == (8, 0)


def test_the_star_limits_all_others_and_a_client_without_a_tenant_has_no_limit() -> None:
    cache = make_cache(64, a=8, **{"*": 4})
    assert store(cache, open_for(cache, "a"), chain_of("x", 20)) == 8
    assert store(cache, open_for(cache, "z"), chain_of("x", 20)) == 4
    assert store(cache, open_for(cache, ""), chain_of("x", 20)) == 20


def test_a_namespace_has_a_quota_of_its_own_beside_its_tenants() -> None:
    spec = NamespaceSpec(engine="own", layout="x", dtype="uint8", block_size=1, block_bytes=FRAME).of_tenant("a")
    cache = make_cache(64, a=8, **{f"ns:{spec.fingerprint()[:8]}": 5})
    other, own = open_for(cache, "a"), cache.space.open_namespace(spec)
    assert store(cache, own, chain_of("x", 20)) == 5
    assert store(cache, other, chain_of("x", 20)) == 8
    assert cache.space.used_bytes("a") == 8 * FRAME
    assert cache.space.quotas.refused == {own.account: 15, "a": 12}


def test_of_two_names_of_one_namespace_the_longer_one_counts() -> None:
    quotas = Quotas({"ns:5d1e0b3a": 1, "ns:5d1e0b3a77": 2, "a": 3})
    assert quotas.account_of("a", "5d1e0b3a77" + "0" * 22) == "ns:5d1e0b3a77"
    assert quotas.account_of("a", "5d1e0b3a00" + "0" * 22) == "ns:5d1e0b3a"
    assert quotas.account_of("a", "0" * 32) == "a"


def test_a_tenant_cannot_take_the_places_of_all_namespaces() -> None:
    cache = make_cache(16)
    for number in range(MAX_TENANT_NAMESPACES):
        open_for(cache, "a", engine=str(number))
    with pytest.raises(NoRoom, match="tenant a has registered 256 namespaces"):
        open_for(cache, "a", engine="one more")
    assert open_for(cache, "a", engine="0").number == 1
    open_for(cache, "b")


def test_quotas_as_they_are_written() -> None:
    config = load_config(flags={"quota": "team-a=16MiB, *=1MiB"}, env={})
    assert config.quota == (("team-a", 16 << 20), ("*", 1 << 20))
    assert load_config(flags={"nvme_quota": "ns:5d1e0b3a=1GiB"}, env={}).nvme_quota == (("ns:5d1e0b3a", 1 << 30),)
    wrong = {
        "team-a": "is not a list",
        "=1MiB": "is not a list",
        "a=1MiB,a=2MiB": "twice",
        "a=x": "a=x",
        "ns:5d1e=1MiB": "first 8",
        "ns:5D1E0B3A=1MiB": "first 8",
        "team a=1MiB": "team a",
    }
    for text, problem in wrong.items():
        with pytest.raises(ConfigError, match=problem):
            load_config(flags={"quota": text}, env={})


def squat(cache: CacheAtOnce, tenant: str, regions: int) -> tuple[Owner, list[Namespace]]:
    """One small block of another size in each region, each kept by a lease."""
    owner, its = Owner(b"s" * 16), []
    for number in range(regions):
        its.append(open_for(cache, tenant, FRAME * (number + 1)))
        assert store(cache, its[-1], chain_of("tiny", 1)) == 1
        assert cache.match(owner, [its[-1]], chain_of("tiny", 1), 60.0).lease is not None
    return owner, its


def settle(cache: CacheAtOnce) -> None:
    while cache.work():
        assert cache.check_integrity() == []
    assert cache.check_integrity() == []


def regions(count: int, **quota: int) -> CacheAtOnce:
    """An arena of so many regions of 16 frames; quotas in frames."""
    cache = make_cache(16, **quota)
    for number in range(1, count):
        cache.space.allocator.add_region(number, REGION)
    return cache


def test_small_blocks_in_every_region_do_not_take_the_arena() -> None:
    cache = regions(4, s=12, a=60)
    owner, its = squat(cache, "s", 4)
    a = open_for(cache, "a", 16 * FRAME)
    for number in range(8):  # a region is back when it is asked for the next time
        store(cache, a, chain_of(f"a{number}", 1))
        settle(cache)
    assert cache.space.used_bytes("a") == 48 * FRAME
    assert len(owner.reads) == 1  # one region it has in any case
    # And the rest that it wants it cannot have by driving others out.
    assert store(cache, its[1], chain_of("again", 1)) + store(cache, its[2], chain_of("again", 1)) < 2
    settle(cache)
    assert cache.space.used_bytes("a") == 48 * FRAME


def test_a_region_taken_back_for_a_store_leaves_no_block_below_one_that_is_dropped() -> None:
    """It was about to hang below a block whose own parent has been flushed."""
    cache = regions(5, s=12, a=70)
    squat(cache, "s", 3)
    owner, a, keys = Owner(bytes(16)), open_for(cache, "a", 16 * FRAME), chain_of("a", 3)
    first, second, third = (key_of(keys, number) for number in range(3))
    cache.writes.commit(owner, cache.reserve(owner, a, b"", first, 60.0).lease_id, [0])
    flushed = cache.reserve(owner, a, first, second, 60.0)
    cache.flush_dram([a.number], first)
    below = cache.reserve(owner, a, second, third, 60.0)
    assert cache.counters.regions_drained == 1
    for got in (flushed, below):
        cache.writes.commit(owner, got.lease_id, range(len(got.frames)))
    settle(cache)
    assert not cache.writes.pending.by_key
    for _ in range(2):  # a region is back when it is asked for the next time
        stored = store(cache, a, keys)
        settle(cache)
    assert stored == 3


def test_a_store_keeps_its_blocks_in_the_region_that_was_taken_back_for_it() -> None:
    """Of a client without the mapping, whose blocks were dropped where it had written them before that."""
    cache = regions(3, s=12, a=70)
    for number in range(3):
        assert store(cache, open_for(cache, "s", FRAME * (number + 1)), chain_of("tiny", 1)) == 1
    remote, a, keys = Owner(b"r" * 16, mapped=False), open_for(cache, "a", 16 * FRAME), chain_of("a", 1)
    got = cache.reserve(remote, a, b"", keys, 60.0)
    assert (len(got.frames), cache.counters.regions_drained) == (1, 1), "it was free at once"
    block = cache.writes.writable_block(remote, got.lease_id, 0)
    assert block is not None
    block.written = 16 * FRAME
    cache.writes.commit(remote, got.lease_id, [0])
    settle(cache)
    assert found(cache, a, keys) == 1


def test_what_accounts_take_is_counted_only_where_frames_came_or_went() -> None:
    """A full arena may have a thousand regions, with hundreds of accounts in each, and asks this for each store."""
    looks = 0

    class Counts(dict[int, int]):
        def items(self) -> Any:
            nonlocal looks
            looks += 1
            return super().items()

    cache = regions(8, **{"*": 1000})
    its = [open_for(cache, f"t{number}") for number in range(11)]
    for number, namespace in enumerate(its):
        store(cache, namespace, chain_of(number, 8))
    allocator, shares = cache.space.allocator, cache.space.shares
    wanted = allocator.size_class(16 * FRAME)
    shares.to_give_back(wanted, 1)
    for region in allocator.size_class(FRAME).regions.values():
        region.counts = Counts(region.counts)
    store(cache, its[0], chain_of("one more", 1))
    looks = 0
    shares.to_give_back(wanted, 1)
    assert looks == 1, "a block was stored in one of six"
    for namespace in (its[3], its[7]):
        cache.flush_dram([namespace.number], b"")
    settle(cache)
    taken = Counter[int]()
    for _, size_bytes, owned, counts in allocator.shares():
        taken.update({account: size_bytes * count // owned for account, count in counts.items()})
    assert +allocator.taken_bytes() == taken
    assert len(taken) == 9


def test_no_account_gives_back_what_its_quota_allows() -> None:
    cache = regions(3, s=48, a=48)
    owner, _ = squat(cache, "s", 3)
    store(cache, open_for(cache, "a", 16 * FRAME), chain_of("a", 1))
    settle(cache)
    assert len(owner.reads) == 3


def test_an_account_whose_quota_was_taken_away_may_take_what_it_wants() -> None:
    cache = regions(4, s=12)
    squat(cache, "s", 3)
    wanted, shares = cache.space.allocator.size_class(16 * FRAME), cache.space.shares
    assert shares.to_give_back(wanted, 0) is not None
    small = cache.space.allocator.size_class(FRAME)
    assert shares.to_give_back(small, 0) not in small.regions, "those have the frames that are wanted"
    cache.space.quotas.change({})
    assert shares.to_give_back(wanted, 0) is None
    assert not shares.at_limit(cache.space.quotas.numbers["s"])
