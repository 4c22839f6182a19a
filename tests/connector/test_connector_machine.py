"""Two engines over a daemon in memory, at random: good or a miss, never wrong, and no lease is left behind.

One engine maps the arena and has its blocks in one array; the other one sends payloads and has two layers. Anything may
happen between two requests or in the middle of a copy: flushes, a lost session, a restart, a cancel, expired leases.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from chains import chain_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from machines import in_first_ring, in_stress
from memory_daemon import (
    BLOCK_BYTES,
    MemoryClient,
    MemoryDaemon,
    Trouble,
    WatchedCopier,
    content,
    split,
)

import tiercache
from tiercache.connector import loads, stores
from tiercache.connector.jobs import JobQueue, Transfer
from tiercache.copies.pool import CopyLost, Limit
from tiercache.protocol import messages as m

SPEC = tiercache.NamespaceSpec(engine="m/1", layout="x", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES)
BLOCKS = 6
_A = chain_of("a", BLOCKS)
CHAINS = [_A, chain_of("b", BLOCKS), chain_of("branch", BLOCKS - 2, after=_A[: 2 * m.KEY_BYTES])]
DIRT = 0xDD
TTL_S = loads.READ_TTL_MS / 1000

engines = st.integers(0, 1)
chains = st.integers(0, len(CHAINS) - 1)
blocks = st.integers(0, BLOCKS - 1)
events = st.sampled_from(
    ["nothing"] * 4 + ["flush", "evict", "cut off", "restart", "void", "disprove", "cancel", "cancel", "expire", "lost"]
)
"""What happens in the middle of a copy."""


def troubles(*kinds: type[m.AnyRequest]) -> st.SearchStrategy[Any]:
    """Which request does not go as it should during a call, and how; or none."""
    return st.none() | st.tuples(st.sampled_from(kinds), st.sampled_from(Trouble))


LOADING = troubles(m.Release, m.Release, m.Resolve, m.Read)
STORING = troubles(m.Reserve, m.Commit, m.Commit, m.Abort, m.Write)


@dataclass
class Held:
    """A match that is neither loaded nor released. `kept`: its client was up and in time ever since."""

    engine: Engine
    match: tiercache.Match
    keys: bytes
    until_s: float
    kept: bool = True


class Engine:
    """A connector, its pool, and what must be in the pool."""

    def __init__(self, daemon: MemoryDaemon, clock_s: Any, *, mapped: bool) -> None:
        self.client = MemoryClient(daemon, clock_s, map_arena=mapped)
        self.layers = [np.full((2 * BLOCKS, BLOCK_BYTES // n), DIRT, np.uint8) for n in ([1] if mapped else [2, 2])]
        pool = tiercache.Pool.from_layers(self.layers)
        client: Any = self.client
        self.connector = tiercache.Connector(client, SPEC, pool, load_timeout_s=1e6)
        mover = self.connector._mover
        assert mover is not None
        self.copier = mover.copier = WatchedCopier(mover.copier, self.client)
        self.known = self.pool()

    def cancelled(self, jobs: JobQueue, begin: Callable[[], Transfer[Any]]) -> Any:
        """The result of a transfer that is cancelled before its turn has come."""
        gate = threading.Event()
        jobs.begin_with(lambda: gate.wait(60))
        transfer = begin()
        transfer.cancel()
        gate.set()
        return transfer.result()

    def pool(self) -> np.ndarray[Any, Any]:
        return np.concatenate(self.layers, axis=1)

    def write(self, blocks: list[int], data: list[bytes]) -> None:
        for block, each in zip(blocks, data, strict=True):
            row, at = np.frombuffer(each, np.uint8), 0
            for layer in self.layers:
                layer[block], at = row[at : at + layer.shape[1]], at + layer.shape[1]
        self.known = self.pool()


class ConnectorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(loads, "RESOLVE_WITH_MATCH", 1)
        self.patch.setattr(loads, "MAX_RESOLVE", 2)
        self.now_s = 1000.0
        self.held: list[Held] = []
        self.unsure: set[tuple[int, int]] = set()
        """Engine and lease of adoptions without an answer: their hold is given back later, and a second one with it."""
        self.lost_frames = 0

    @initialize(frames=st.integers(4, 3 * BLOCKS), stored=st.integers(0, BLOCKS), edge=st.integers(1, 2))
    def begin(self, frames: int, stored: int, edge: int) -> None:
        self.patch.setattr(stores, "EDGE_BYTES", edge * BLOCK_BYTES)
        self.patch.setattr(stores, "WINDOW_BYTES", 2 * BLOCK_BYTES)
        self.frames = frames
        self.daemon = MemoryDaemon(self.clock_s, frames)
        self.engines = [Engine(self.daemon, self.clock_s, mapped=mapped) for mapped in (True, False)]
        for its, keys in zip(self.engines, CHAINS, strict=False):
            its.write(list(range(stored)), [content(key) for key in split(keys)[:stored]])
            its.connector.store(keys, range(stored))

    def clock_s(self) -> float:
        return self.now_s

    # --- calls of an engine -----------------------------------------------------------------------

    @rule(engine=engines, chain=chains, first=blocks, count=blocks, event=events, trouble=STORING, data=st.data())
    def store(
        self, engine: int, chain: int, first: int, count: int, event: str, trouble: Any, data: st.DataObject
    ) -> None:
        its, keys = self.engines[engine], CHAINS[chain]
        first %= 1 + self.daemon.run(keys)
        keys = keys[: (first + 1 + count) * m.KEY_BYTES]
        named = split(keys)[first:]
        ids = list(range(len(named)))
        its.write(ids, [content(key) for key in named])
        before = set(self.daemon.visible)
        alone = not self.daemon.pending
        with self.during(its, event, trouble, data, keys, source=ids) as quiet:
            if event != "lost" and data.draw(st.booleans()):
                result = its.connector.store_async(keys, ids, first=first).result(60)
            else:
                result = its.connector.store(keys, ids, first=first)
            assert sum(result[:3]) == len(ids)
            assert min(result[:3]) >= 0
            assert not (result.parent_missing and result.stored + result.present)
            if quiet and alone:
                now = [key in self.daemon.visible for key in named]
                assert result.stored + result.present == sum(now)
                assert result.stored == len(set(self.daemon.visible) - before)
                assert not result.parent_missing
                assert result.dropped == 0 or not self.daemon.free

    @rule(engine=engines, chain=chains)
    def cancel_in_the_queue(self, engine: int, chain: int) -> None:
        """Nothing is copied then, and each lease ends at once."""
        its, keys = self.engines[engine].connector, CHAINS[chain]
        stored = self.engines[engine].cancelled(its._stores, lambda: its.store_async(keys, range(BLOCKS)))
        assert stored == (0, 0, BLOCKS, False)
        before = {*self.daemon.reads}
        match = its.match(keys)
        assert self.engines[engine].cancelled(its._loads, lambda: its.load_async(match, range(match.blocks))) == 0
        assert {*self.daemon.reads} <= before

    @rule(engine=engines, chain=chains, first=blocks)
    def store_without_parent(self, engine: int, chain: int, first: int) -> None:
        its, keys = self.engines[engine], CHAINS[chain]
        named = split(keys)
        first = min(first, BLOCKS - 1)
        known = {*self.daemon.visible, *self.daemon.pending}
        if first and its.connector.available and named[first - 1] not in known:
            its.write([0], [content(named[first])])
            assert its.connector.store(keys, [0], first=first) == (0, 0, 1, True)

    @rule(engine=engines, chain=chains, trouble=troubles(m.Match), data=st.data())
    def match(self, engine: int, chain: int, trouble: Any, data: st.DataObject) -> None:
        its, keys = self.engines[engine], CHAINS[chain]
        with self.during(its, "nothing", trouble, data, keys) as quiet:
            match = its.connector.match(keys)
            assert match.blocks == self.daemon.run(keys) or (not quiet and match.blocks == 0)
            if match.blocks:
                self.held.append(Held(its, match, keys, self.now_s + 600))

    @precondition(lambda self: self.held)
    @rule(place=blocks, engine=engines, trouble=troubles(m.Hold), data=st.data())
    def hand_over(self, place: int, engine: int, trouble: Any, data: st.DataObject) -> None:
        """Another engine, a process of the same instance, adopts a match."""
        held, its = self.held[place % len(self.held)], self.engines[engine]
        if any(one.engine is its and one.match._lease == held.match._lease for one in self.held):
            return  # its own
        lives, unsure = self.lease(held) is not None, (engine, held.match._lease)
        if trouble is not None:
            self.unsure.add(unsure)
        with self.during(its, "nothing", trouble, data, held.keys) as quiet:
            match = its.connector.adopt(held.match.ticket())
            expected = held.match.blocks if lives else 0
            assert match.blocks == expected or (not quiet and match.blocks == 0)
            if match.blocks:
                self.held.append(Held(its, match, held.keys, self.now_s + 600, unsure not in self.unsure))

    @precondition(lambda self: self.held)
    @rule(place=blocks, first=blocks, count=blocks, event=events, trouble=LOADING, data=st.data())
    def load(self, place: int, first: int, count: int, event: str, trouble: Any, data: st.DataObject) -> None:
        held = self.held.pop(place % len(self.held))
        its, first = held.engine, first % (held.match.blocks + 1)
        named = split(held.keys)[first:]
        ids = [BLOCKS + (place + each) % BLOCKS for each in range(count + 1)]
        lease = self.lease(held)
        with self.during(its, event, trouble, data, held.keys) as quiet:
            try:
                if event != "lost" and data.draw(st.booleans()):
                    good = its.connector.load_async(held.match, ids, first=first).result(60)
                else:
                    good = its.connector.load(held.match, ids, first=first)
                pool = its.pool()
                for block, key in list(zip(ids, named, strict=False))[:good]:
                    assert pool[block].tobytes() == content(key)
                most = min(len(ids), held.match.blocks - first)
                if lease is None or not lease.good:
                    assert good == 0, "no daemon confirms these blocks"
                assert good == most or (not quiet and good < most) or lease is None or not lease.good
                assert its.connector.load(held.match, ids) == 0, "a match is used up"
            finally:
                its.known[ids] = its.pool()[ids]  # the rest of them holds anything

    @rule(engine=engines, chain=chains, first=blocks, count=blocks, event=events, trouble=LOADING, data=st.data())
    def fetch(
        self, engine: int, chain: int, first: int, count: int, event: str, trouble: Any, data: st.DataObject
    ) -> None:
        before = len(self.held)
        self.match(engine, chain, None, data)
        if len(self.held) > before:
            self.load(before, first, count, event, trouble, data)

    @precondition(lambda self: self.held)
    @rule(place=blocks, forget=st.booleans())
    def release(self, place: int, forget: bool) -> None:
        """A match that is forgotten ends too, when leases are renewed next."""
        held = self.held.pop(place % len(self.held))
        if not forget:
            held.engine.connector.release(held.match)
        del held
        gc.collect(0)

    # --- what happens -----------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["pace", "pace", "flush", "evict", "evict", "silence", "restart"]),
        chain=chains,
        number=blocks,
        late=st.booleans(),
    )
    def change(self, what: str, chain: int, number: int, late: bool) -> None:
        """Something happens between two calls."""
        if what == "pace":
            self.daemon.late, self.daemon.slow, self.daemon.most = late, number % 3, 1 + number % 3
        elif what == "flush":
            self.daemon.flush(split(CHAINS[chain])[number])
        elif what == "evict":
            for _ in range(number + 1):
                self.daemon.evict()
        elif what == "silence":
            self.silence()
        else:
            self.restart()

    @rule(count=st.integers(1, 3))
    def time_passes(self, count: int) -> None:
        """Leases are renewed in the background, so all that are in use stay."""
        for _ in range(count):
            self.now_s += 0.4 * TTL_S
            for engine in self.engines:
                if engine.client.alive:
                    engine.client.tidy()
            for held in self.held:
                held.kept &= held.engine.client.alive
            self.daemon.expire()
        for held in self.held:
            if held.kept and self.now_s < held.until_s:
                assert self.lease(held) is not None, "a lease in use was not renewed"

    def silence(self) -> None:
        """The clients stand still for longer than their leases."""
        self.now_s += TTL_S + 1
        self.daemon.expire()
        for held in self.held:
            held.kept = False

    def restart(self) -> None:
        self.daemon.alive = False
        for lease in self.daemon.reads.values():
            lease.good = False
        for held in self.held:
            held.kept = False
        for engine in self.engines:
            engine.client.lose_session()
        self.daemon = MemoryDaemon(self.clock_s, self.frames, self.daemon.generation + 1)
        self.lost_frames = 0
        for engine in self.engines:
            engine.client.daemon = self.daemon

    @rule()
    def settle(self) -> None:
        """The clients come back: the daemon then has the leases that are in use, and no others."""
        gc.collect(0)
        for engine in self.engines:
            engine.client.recover(self.daemon)
        in_use = {held.match._lease for held in self.held if self.lease(held) is not None}
        assert set(self.daemon.reads) <= in_use
        assert self.daemon.writes == {}
        assert len(self.daemon.quarantined()) <= self.lost_frames
        assert all(one.client.leases.wait_idle(0) for one in self.engines)

    # --- help -------------------------------------------------------------------------------------

    def lease(self, held: Held) -> Any:
        """The daemon's side of a match, if its session has it."""
        session = held.match._session
        if session is None or session.generation != self.daemon.generation:
            return None
        lease = self.daemon.reads.get(held.match._lease)
        return lease if lease is not None and session in lease.holders else None

    @contextmanager
    def during(
        self, its: Engine, event: str, trouble: Any, data: st.DataObject, keys: bytes, source: Sequence[int] = ()
    ) -> Iterator[bool]:
        """What happens during a call of this engine; the value is true if nothing does and the engine is up."""

        doomed = split(keys)[data.draw(blocks) % (len(keys) // m.KEY_BYTES)] if event == "flush" else b""

        def meanwhile(limit: Limit) -> None:
            if event == "flush":
                self.daemon.flush(doomed)
            elif event == "evict":
                self.daemon.evict()
            elif event == "cut off":
                its.client.lose_session()
            elif event == "restart":
                self.restart()
            elif event in ("void", "disprove") and source:
                if event == "void":
                    limit.annul()
                else:
                    limit.proof = lambda: False
                self.daemon.voided |= {*self.daemon.copying}
                its.write(source, [bytes([DIRT]) * BLOCK_BYTES] * len(source))  # the engine reuses them
            elif event in ("void", "disprove", "cancel"):
                limit.stop()
            elif event == "expire":
                self.silence()
            elif event == "lost":
                self.lost_frames += self.frames
                raise CopyLost("the device broke")

        self.daemon.trouble = {} if trouble is None else {trouble[0]: trouble[1]}
        its.copier.meanwhile = meanwhile
        try:
            yield event == "nothing" and trouble is None and its.connector.available
        except CopyLost:
            assert event == "lost"
        self.daemon.trouble = {}
        its.copier.meanwhile = lambda limit: None
        for held in self.held:
            held.kept &= held.engine.client.alive
        if not its.connector.available and data.draw(st.integers(0, 3)):
            self.settle()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "daemon"):
            self.daemon.check_integrity()
            for engine in self.engines:
                assert np.array_equal(engine.pool(), engine.known), "a block of another request was written to"
                assert engine.client.under_way == 0, "the reply to a request is never taken"

    def teardown(self) -> None:
        try:
            if hasattr(self, "daemon"):
                for held in self.held:
                    held.engine.connector.release(held.match)
                self.held.clear()
                self.settle()
                assert self.daemon.reads == {}
                for engine in self.engines:
                    engine.connector.close()
        finally:
            self.patch.undo()


TestConnector = in_first_ring(ConnectorMachine, examples=250, steps=40)
TestConnectorForLong = in_stress(ConnectorMachine)


def test_a_ticket_of_a_former_life_of_the_daemon_is_a_miss() -> None:
    """Although a lease of the new life has the same number."""
    its, key = Engine(MemoryDaemon(lambda: 0.0, 8), lambda: 0.0, mapped=True), _A[: m.KEY_BYTES]

    def match() -> tiercache.Match:
        its.write([0], [content(key)])
        assert its.connector.store(key, [0]).stored == 1
        return its.connector.match(key)

    former = match()
    ticket = former.ticket()
    assert its.connector.adopt(ticket).blocks == 1
    its.client.lose_session()
    its.client.recover(MemoryDaemon(lambda: 0.0, 8, generation=2))
    present = match()
    assert present.blocks == 1
    assert its.connector.adopt(ticket).blocks == 0
