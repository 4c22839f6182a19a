"""A relay between hosts and a real Valkey holds back, drips, cuts and refuses what the server says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from chains import chain_of
from host_rig import BLOCK_BYTES, REGION_BYTES, HostRig, Hosts, names_of
from played import play, played
from relay import Relay
from valkey_rig import ValkeyServer

from tiercache.daemon.tiers.dram.leases import ReadLease
from tiercache.daemon.tiers.shared import breaker, fetches, presence, writes
from tiercache.daemon.tiers.shared.stores import open_store
from tiercache.protocol.messages import BlockState

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")

BLOCKS = 12
CHAIN = chain_of("x", BLOCKS)
LATE_S = 0.2
FRAMES = REGION_BYTES // BLOCK_BYTES


@pytest.fixture
def server(one_valkey: ValkeyServer) -> ValkeyServer:
    assert one_valkey.ask("FLUSHALL") == b"+OK"
    return one_valkey


@pytest.fixture
def relay(server: ValkeyServer) -> Iterator[Relay]:
    with Relay(server.port) as one:
        yield one


@pytest.fixture
def hosts(server: ValkeyServer, tmp_path: Path) -> Hosts:
    """Hosts that reach the server without the relay, unless a test says otherwise."""
    return Hosts(lambda: open_store(server.url), tmp_path)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches have little time, and failures open no breaker."""
    monkeypatch.setattr(fetches, "FETCH_S", LATE_S)
    monkeypatch.setattr(breaker, "FAILURES", 1000)


async def stored(a: HostRig, *chains: bytes) -> None:
    for chain in chains:
        a.store(a.namespace(), chain)
    await a.sent()


def anew(b: HostRig) -> None:
    """It has nothing in DRAM, and believes nothing of the store."""
    b.forget_dram()
    b.shared.presence.forget()


async def fetching(b: HostRig, relay: Relay) -> ReadLease:
    """A lease whose blocks are on their way from the store: the relay keeps some."""
    assert await b.look_up([b.namespace()], CHAIN) == BLOCKS
    relay.hold(6000)
    lease = b.cache.match(b.owner, [b.namespace()], CHAIN, 60.0, promote=True).lease
    assert lease is not None
    await b.until(lambda: relay.waiting > 0)
    return lease


# --- a fetch -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("secret", [bytes(range(32)), None], ids=["sealed", "plain"])
def test_a_reset_within_a_value(hosts: Hosts, relay: Relay, secret: bytes | None) -> None:
    """Wherever the connection ends, whole blocks are good, and the rest is a miss."""

    async def scenario() -> None:
        async with hosts:
            a, b = hosts.open(secret=secret), hosts.open(open_store(relay.url), secret=secret)
            await stored(a, CHAIN)
            found = set()
            for after_bytes in (0, 5, 100, 200, 4000, 4300, 9000, 13_000, 20_000, 30_000):
                assert await b.look_up([b.namespace()], CHAIN) == BLOCKS
                relay.cut(after_bytes)
                found.add(await b.load([b.namespace()], CHAIN))
                relay.go_on()
                anew(b)
            assert found - {0, BLOCKS}, "it never ended in the middle"
            assert await b.load([b.namespace()], CHAIN) == BLOCKS
            assert b.shared.source.tally.bad_blocks == 0

    play(scenario)


@pytest.mark.usefixtures("brief")
@played
async def test_a_drip(hosts: Hosts, relay: Relay) -> None:
    """Each byte comes in time, and the call is over in its own."""
    async with hosts:
        a, b = hosts.open(), hosts.open(open_store(relay.url))
        await stored(a, CHAIN)
        assert await b.look_up([b.namespace()], CHAIN) == BLOCKS
        relay.drip()
        assert await b.load([b.namespace()], CHAIN) == 0
        relay.go_on()
        anew(b)
        assert await b.load([b.namespace()], CHAIN) == BLOCKS


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("secret", [bytes(range(32)), None], ids=["sealed", "plain"])
def test_replies_that_come_after_a_time_out(hosts: Hosts, relay: Relay, secret: bytes | None) -> None:
    """They reach no later call: values of another prompt come on the same lines, and no byte of the first."""

    async def scenario() -> None:
        async with hosts:
            a, b = hosts.open(secret=secret), hosts.open(open_store(relay.url), secret=secret)
            other = chain_of("y", BLOCKS)
            await stored(a, CHAIN, other)
            for after_bytes in (0, 100, 6000):
                assert await b.look_up([b.namespace()], CHAIN) == BLOCKS
                assert await b.look_up([b.namespace()], other) == BLOCKS
                relay.hold(after_bytes)
                assert await b.load([b.namespace()], CHAIN) < BLOCKS
                relay.go_on()
                assert await b.load([b.namespace()], other) == BLOCKS
                anew(b)
            assert b.shared.source.tally.bad_blocks == 0

    play(scenario)


@pytest.mark.parametrize("secret", [bytes(range(32)), None], ids=["sealed", "plain"])
def test_an_abort_during_a_fetch_leaves_its_frames_alone_until_it_ends(
    hosts: Hosts, relay: Relay, secret: bytes | None
) -> None:
    """What arrives late must not be written over blocks that were stored meanwhile."""

    async def scenario() -> None:
        async with hosts:
            a, b = hosts.open(secret=secret), hosts.open(open_store(relay.url), secret=secret, regions=1)
            space = b.namespace(extra={"tiers": "dram"})
            await stored(a, CHAIN)
            lease = await fetching(b, relay)
            b.cache.reads.release(b.owner, lease.lease_id)
            b.forget_dram()
            chains = [chain_of(f"y{number}", 16) for number in range(2 * FRAMES // 16)]
            for one in chains:
                b.store(space, one)
            relay.go_on()
            await b.until(lambda: b.below.settled)
            found = [await b.load([space], one) for one in chains]
            assert sum(found) > FRAMES // 2
            assert await b.load([b.namespace()], CHAIN) == BLOCKS

    play(scenario)


@pytest.mark.parametrize("whose", ["own", "other"])
def test_a_flush_during_a_fetch(hosts: Hosts, relay: Relay, whose: str) -> None:
    """What comes after it is not served again, on this host and on others."""

    async def scenario() -> None:
        async with hosts:
            a, b = hosts.open(), hosts.open(open_store(relay.url))
            await stored(a, CHAIN)
            lease = await fetching(b, relay)
            if whose == "other":
                assert await a.flush()
                relay.go_on()
            else:
                flushed = asyncio.ensure_future(b.flush())
                await asyncio.sleep(0)  # it has begun, and waits for the store
                relay.go_on()
                assert await flushed
            await b.until(lambda: lease.over or lease.lease_id not in b.cache.reads.growing.leases)
            b.cache.reads.release(b.owner, lease.lease_id)
            b.forget_dram()
            assert await b.load([b.namespace()], CHAIN) == 0
            a.forget_dram()
            assert await a.load([a.namespace()], CHAIN) == 0
            await stored(b, CHAIN)
            assert await a.load([a.namespace()], CHAIN) == BLOCKS, "what is stored since is sent"

    play(scenario)


# --- a write -------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["own", "other"])
def test_a_flush_during_write_behind(hosts: Hosts, relay: Relay, whose: str) -> None:
    """Blocks from before it, which wait to be sent, are found nowhere after it."""

    async def scenario() -> None:
        async with hosts:
            a, b = hosts.open(), hosts.open(open_store(relay.url))
            assert await b.look_up([b.namespace()], CHAIN) == 0  # so the notes are known
            relay.hold()
            b.store(b.namespace(), chain_of("before", 100))  # the lines are busy with these
            b.store(b.namespace(), CHAIN)
            await b.until(lambda: relay.waiting > 1 and not b.shared._writes.queued)
            if whose == "other":
                assert await a.flush()
                relay.go_on()
            else:
                answers = list[bool]()
                b.shared.begin_flush([b.namespace()], b"", answers.append)
                relay.go_on()
                await b.until(lambda: answers == [True])
            b.forget_dram()
            await b.sent()
            for one in (a, hosts.open()):
                assert await one.load([one.namespace()], CHAIN) == 0

    play(scenario)


@played
async def test_two_hosts_put_the_same_blocks_at_once(hosts: Hosts, server: ValkeyServer, relay: Relay) -> None:
    """Both find them missing, and both send them: sealed, their bytes differ, and each is whole."""
    with Relay(server.port) as other:
        async with hosts:
            a, b = hosts.open(open_store(relay.url)), hosts.open(open_store(other.url))
            for one in (a, b):
                await stored(one, CHAIN[:16])
            relay.hold()
            other.hold()
            for one in (a, b):
                one.store(one.namespace(), CHAIN, first=1)
                one.cache.work()
            await a.until(lambda: relay.waiting > 0 and other.waiting > 0)
            relay.go_on()
            other.go_on()
            await a.sent()
            await b.sent()
            assert a.shared.stats()["written_blocks"] + b.shared.stats()["written_blocks"] == 2 * BLOCKS - 1
            c = hosts.open()
            assert await c.load([c.namespace()], CHAIN) == BLOCKS
            assert c.shared.source.tally.bad_blocks == 0


@played
async def test_a_store_that_answers_no_write(hosts: Hosts, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is full and drops, and DRAM evicts as ever: what waits to be sent keeps no more than a part of it."""
    monkeypatch.setattr(writes, "MAX_QUEUED", 64)
    async with hosts:
        b = hosts.open(open_store(relay.url), regions=1)
        space = b.namespace()
        await stored(b, chain_of("first", 1))
        relay.hold()
        chains = [chain_of(f"y{number}", 16) for number in range(3 * FRAMES // 16)]
        for one in chains:
            assert BlockState.NONE not in b.store(space, one), "there was no room"
            b.cache.work()
        assert b.shared._writes.queued <= 64
        assert b.shared.stats()["skipped_queue_full"] > 0
        assert b.cache.counters.evicted_blocks >= FRAMES
        assert space.table.blocks >= FRAMES // 2
        relay.go_on()
        await b.sent()
        a = hosts.open()
        for one in chains[-4:]:
            assert await a.load([a.namespace()], one) <= 16


# --- look-ups ------------------------------------------------------------------------------------


@played
async def test_a_thousand_matches_of_one_prompt(hosts: Hosts, server: ValkeyServer, relay: Relay) -> None:
    async with hosts:
        a, b = hosts.open(), hosts.open(open_store(relay.url))
        await stored(a, CHAIN)
        await b.look_up([b.namespace()], chain_of("other", 1))
        asked = calls(server, "exists")
        relay.hold()
        went = list[int]()
        for number in range(1000):
            assert b.below.wait([b.namespace()], CHAIN, [0], lambda number=number: went.append(number))  # type: ignore[misc]
        await b.until(lambda: relay.waiting > 0)
        assert not went
        relay.go_on()
        await b.until(lambda: len(went) == 1000)
        assert calls(server, "exists") - asked <= 3 * BLOCKS
        assert await b.load([b.namespace()], CHAIN) == BLOCKS


@played
async def test_what_is_claimed_and_never_fetched_is_not_asked_for_again_and_again(
    hosts: Hosts, server: ValkeyServer
) -> None:
    """EXISTS says that it is there, GET fails, whatever is tried: else an engine waits and asks for ever."""
    async with hosts:
        a, b = hosts.open(), hosts.open()
        await stored(a, CHAIN)
        bad = names_of(a, CHAIN)[5]
        assert server.ask("DEL", bad) == b":1"
        assert server.ask("RPUSH", bad, "no string") == b":1"
        now_s = [1000.0]
        b.shared.presence._clock_s = lambda: now_s[0]
        assert await b.load([b.namespace()], CHAIN) == 5
        asked = calls(server, "getex")
        for _ in range(20):
            b.forget_dram()
            assert await b.load([b.namespace()], CHAIN) == 5
        assert calls(server, "getex") - asked == 20 * 5
        now_s[0] += presence.UNFETCHABLE_S
        assert await b.look_up([b.namespace()], CHAIN) == BLOCKS, "it may be there by now"
        b.store(b.namespace(), CHAIN)
        assert await b.load([b.namespace()], CHAIN) == BLOCKS


def calls(server: ValkeyServer, command: str) -> int:
    """How often the server has run a command."""
    lines = server.ask("INFO", "commandstats").decode().splitlines()
    return next((int(line.split("calls=")[1].split(",")[0]) for line in lines if f"cmdstat_{command}:" in line), 0)
