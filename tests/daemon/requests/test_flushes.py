"""Flush requests: how much of them may wait for disks, and that nothing of them stays behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chains import chain_of, key_of
from host_rig import host
from memory_disks import MemoryDisk
from memory_store import MemoryStore
from played import Clock, on_clock, played
from tier_rig import TierRig

from tiercache.daemon.ground.slices import Steps, finish
from tiercache.daemon.requests import flushes as flush_requests
from tiercache.daemon.requests.context import RequestContext
from tiercache.daemon.requests.flushes import FlushRequests
from tiercache.daemon.requests.router import Answer
from tiercache.daemon.requests.sessions import Session
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.moves.flushes import FLUSH_S, FlushUnderWay
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import Hello

PAGE = 4096
CHAIN = chain_of("a", 40)


class Service:
    """Two clients of a cache with one disk in memory, and what they were answered."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self.disk = MemoryDisk(0, clock)
        self.rig = TierRig(root, [self.disk])
        self.answers: list[m.Reply] = []
        self.sessions = [Session(Hello(1, 1, bytes(16), party, 0, False), party) for party in ("one", "other")]
        by_token = {session.token: session for session in self.sessions}
        context = RequestContext(self.rig.cache, 1, by_token, {}, 60.0, 100, 1 << 20)
        context.send = self._sent
        self._flush: Callable[[Session, m.Flush], Steps[m.Reply | None]]
        self._flush = FlushRequests(context).methods()[m.Flush]  # type: ignore[assignment]

    def _sent(self, identity: bytes, answer: Answer) -> None:
        self.answers.append(msgspec.msgpack.decode(answer.header, type=m.ANY_REPLY))

    async def open(self, namespaces: int) -> list[Namespace]:
        await self.rig.open()
        found = [self.rig.namespace(PAGE, rank) for rank in range(namespaces)]
        await self.rig.store_below(found, CHAIN)
        return found

    def flush(self, who: int, namespaces: list[Namespace], block: int) -> None:
        session, numbers = self.sessions[who], [one.number for one in namespaces]
        request = m.Flush(1, session.token, 1, 0, "all", numbers, key_of(CHAIN, block))
        assert finish(self._flush(session, request)) is None, "it is answered once the disk has it"


@on_clock
async def test_flushes_that_wait_for_a_disk_are_bounded_for_each_client(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush is answered after a while even if a disk has not confirmed it; what waits stays in memory."""
    monkeypatch.setattr(flush_requests, "MAX_UNWRITTEN", 5)
    service = Service(tmp_path, clock)
    namespaces = await service.open(2)
    service.disk.hung = True
    service.flush(0, namespaces, 39)
    service.flush(0, namespaces, 38)
    clock.now_s += FLUSH_S
    await service.rig.work()
    blocks, pending = service.rig.tier.stats()["blocks"], service.rig.shelves[0].catalog.pending
    assert [type(answer) for answer in service.answers] == [m.Error, m.Error]
    with pytest.raises(RequestRefused, match="flushes of 4 namespaces by this client are not on disk yet"):
        service.flush(0, namespaces, 37)
    stats = service.rig.tier.stats()
    assert (stats["blocks"], service.rig.shelves[0].catalog.pending) == (blocks, pending), "it has flushed nothing"
    service.flush(1, namespaces, 37)
    service.flush(0, namespaces[:1], 36)
    service.disk.hung = False
    await service.rig.committed()
    service.flush(0, namespaces, 35)
    await service.rig.committed()
    assert [type(answer) for answer in service.answers[2:]] == [m.Flushed] * 3
    await service.rig.close()


@pytest.mark.parametrize(
    ("limit", "second", "whose"), [("MAX_UNWRITTEN", 0, "this client"), ("MAX_UNWRITTEN_OF_ALL", 1, "all clients")]
)
@on_clock
async def test_a_flush_of_any_size_begins_when_none_waits_and_no_other_until_it_is_written(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, second: int, whose: str
) -> None:
    """The second one is by the same client, or by another: each process of this host is one."""
    monkeypatch.setattr(flush_requests, limit, 1)
    service = Service(tmp_path, clock)
    namespaces = await service.open(3)
    service.disk.hung = True
    service.flush(0, namespaces, 39)
    with pytest.raises(RequestRefused, match=f"flushes of 3 namespaces by {whose} are not on disk yet"):
        service.flush(second, namespaces, 38)
    service.disk.hung = False
    await service.rig.committed()
    service.flush(second, namespaces, 38)
    await service.rig.committed()
    assert [type(answer) for answer in service.answers] == [m.Flushed] * 2
    await service.rig.close()


@pytest.mark.parametrize("where", ["DRAM", "NVMe"])
@on_clock
async def test_a_flush_that_fails_is_not_answered_besides_and_counts_no_longer(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The exception becomes an answer."""
    monkeypatch.setattr(flush_requests, "MAX_UNWRITTEN", 1)
    service = Service(tmp_path, clock)
    await service.open(1)
    with monkeypatch.context() as patch:
        if where == "DRAM":
            patch.setattr(service.rig.cache.space.index, "unlink_slice", lambda most: 1 // 0)
        else:
            patch.setattr(service.rig.shelves[0], "drop_unserved", lambda done: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            service.flush(0, [], 39)
    await service.rig.committed()
    clock.now_s += FLUSH_S
    await service.rig.work()
    assert service.answers == []
    service.flush(0, [], 38)
    await service.rig.committed()
    assert [type(answer) for answer in service.answers] == [m.Flushed]
    await service.rig.close()


@on_clock
async def test_an_answered_flush_is_freed_at_once(clock: Clock, tmp_path: Path) -> None:
    """The collector of cycles comes seldom in a daemon, and stops its loop when it does."""
    service = Service(tmp_path, clock)
    namespaces = await service.open(1)

    def flushes() -> list[FlushUnderWay]:
        # By `type`: some objects of other packages answer `isinstance` with a warning.
        return [one for one in gc.get_objects() if issubclass(type(one), FlushUnderWay) and one.blocks]

    of_other_tests = flushes()
    gc.disable()
    try:
        for block in range(39, 29, -1):
            service.flush(0, namespaces, block)
            await service.rig.committed()
        await service.rig.work()
        own = [one for one in flushes() if not any(one is other for other in of_other_tests)]
    finally:
        gc.enable()
    assert len(service.answers) == 10
    assert len(own) <= 1, "the last one is known until its client flushes again"
    await service.rig.close()


@pytest.mark.parametrize("tier", ["all", "shared", "dram"])
@played
async def test_a_prefix_in_a_shared_store_is_flushed_by_namespace(tmp_path: Path, tier: str) -> None:
    """Other hosts may have namespaces that this one does not know: an answer that it is gone would be wrong."""
    rig = host(MemoryStore(), tmp_path, "a")
    space = rig.namespace()
    rig.store(space, CHAIN)
    await rig.sent()
    session = Session(Hello(1, 1, bytes(16), "one", 0, False), "one")
    context = RequestContext(rig.cache, 1, {session.token: session}, {}, 60.0, 100, 1 << 20)
    context.send = lambda identity, answer: None
    flush: Any = FlushRequests(context).methods()[m.Flush]
    request = m.Flush(1, session.token, 1, 0, tier, [], key_of(CHAIN, 3))
    if tier == "dram":
        assert finish(flush(session, request)).blocks == 37
    else:
        with pytest.raises(RequestRefused, match="name those of the prefix, or flush everything"):
            finish(flush(session, request))
        assert await rig.load([space], CHAIN) == 40
        assert finish(flush(session, msgspec.structs.replace(request, namespaces=[space.number]))) is None
    assert rig.cache.counters.flushes == 1
    await rig.close()
