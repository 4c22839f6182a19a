"""Troubles of whole stores: credentials that are changed, clocks that are wrong, and a store that comes and goes."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from host_rig import BLOCK_BYTES, REGION_BYTES, HostRig, Hosts
from played import play, played
from relay import Relay
from s3_rig import KEY, SECRET, FakeServer, RcloneServer
from stored import Stored, StoredInFolder
from valkey_rig import ValkeyServer
from waiting import state_of, wait_until

from tiercache.daemon.tiers.shared import breaker, fetches, write_job, writes
from tiercache.daemon.tiers.shared.breaker import LAST_PAUSE_S, RAMP_S
from tiercache.daemon.tiers.shared.stores import open_store
from tiercache.daemon.tiers.shared.stores.helper import supervisor
from tiercache.daemon.tiers.shared.write_job import WriteJob

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")

BLOCKS = 12
CHAIN, OTHER = chain_of("x", BLOCKS), chain_of("y", BLOCKS)


@pytest.fixture
def server(one_valkey: ValkeyServer) -> ValkeyServer:
    assert one_valkey.ask("FLUSHALL") == b"+OK"
    return one_valkey


class Clock:
    """A host's clock, which a test moves on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s

    def of(self, one: HostRig) -> HostRig:
        """It is the one of this host's breaker."""
        one.shared.breaker._clock_s = self
        return one


async def stored(a: HostRig, *chains: bytes) -> None:
    for chain in chains:
        a.store(a.namespace(), chain)
    await a.sent()


async def found(b: HostRig, chain: bytes = CHAIN) -> int:
    """What the store serves now."""
    b.forget_dram()
    b.shared.presence.forget()
    return await b.load([b.namespace()], chain)


async def back(b: HostRig, clock: Clock) -> None:
    """Once the store answers again, with as many requests as ever."""

    def closed() -> bool:
        clock.ahead_s += LAST_PAUSE_S
        return b.shared.breaker.closed

    await b.until(closed)
    clock.ahead_s += RAMP_S


# --- credentials ---------------------------------------------------------------------------------


@played
async def test_a_password_that_is_changed(server: ValkeyServer, tmp_path: Path) -> None:
    """One refusal is enough: the store is left alone, DRAM serves, and no text has the password."""
    clock, url = Clock(), server.url.replace("://", "://:first-word@")
    server.change_password("first-word")
    try:
        async with Hosts(lambda: open_store(url), tmp_path) as hosts:
            a, b = hosts.open(), clock.of(hosts.open())
            await stored(a, CHAIN)
            assert await found(b) == BLOCKS
            server.change_password("second-word")
            assert await b.load([b.namespace()], OTHER) == 0
            await b.until(lambda: not b.shared.breaker.closed)
            [reason] = b.shared.reasons()
            assert "it rejects our user or password: check them in the store's URL" in reason
            assert "-word" not in reason
            assert await b.load([b.namespace()], CHAIN) == BLOCKS, "DRAM serves"
            server.change_password("first-word")
            await back(b, clock)
            assert await found(b) == BLOCKS
    finally:
        server.change_password("")


@played
async def test_a_secret_of_s3_that_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("obstore", reason="needs Python 3.11 or later")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    clock, server = Clock(), RcloneServer(tmp_path / "s3")
    try:
        server.wait()
        async with Hosts(lambda: open_store(f"{server.url('kv')}&pack=1"), tmp_path) as hosts:
            a, b = hosts.open(), clock.of(hosts.open())
            await stored(a, CHAIN)
            assert await found(b) == BLOCKS
            server.restart("another-secret")
            assert await b.load([b.namespace()], OTHER) == 0
            await b.until(lambda: not b.shared.breaker.closed)
            [reason] = b.shared.reasons()
            assert "AWS_SECRET_ACCESS_KEY" in reason
            assert await b.load([b.namespace()], CHAIN) == BLOCKS, "DRAM serves"
            server.restart(SECRET)
            await back(b, clock)
            assert await found(b) == BLOCKS
            assert SECRET not in caplog.text
    finally:
        server.end()


@played
async def test_a_seal_key_that_is_changed_on_one_host_after_another(stored_in: Stored, tmp_path: Path) -> None:
    """Hosts with the old and the new key share a store meanwhile: each finds what was sealed with its own."""
    old, new = bytes(32), bytes(range(32))
    async with Hosts(stored_in.open, tmp_path) as hosts:
        a, b = hosts.open(secret=old), hosts.open(secret=new)
        await stored(a, CHAIN)
        assert await found(b) == 0
        await stored(b, CHAIN)
        assert await found(a) == await found(b) == BLOCKS
        changed = hosts.open(secret=new)
        assert await found(changed) == BLOCKS
        assert [one.shared.source.tally.bad_blocks for one in (a, b, changed)] == [0, 0, 0]


# --- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("off_min", [-20, 20])
def test_a_clock_that_s3_does_not_accept(off_min: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as what it is, and the store is used once the clocks agree."""
    pytest.importorskip("obstore", reason="needs Python 3.11 or later")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    clock, server = Clock(), FakeServer()

    async def scenario() -> None:
        async with Hosts(lambda: open_store(server.url("&pack=1")), tmp_path) as hosts:
            a, b = hosts.open(), clock.of(hosts.open())
            await stored(a, CHAIN)
            server.clock_ahead = timedelta(minutes=off_min)
            assert await b.load([b.namespace()], CHAIN) == 0
            await b.until(lambda: not b.shared.breaker.closed)
            assert "the clock of this host or of the server is wrong" in b.shared.reasons()[0]
            server.clock_ahead = timedelta(0)
            await back(b, clock)
            assert await found(b) == BLOCKS

    try:
        play(scenario)
    finally:
        server.end()


@pytest.mark.parametrize("off_min", [-20, 20])
def test_a_host_whose_clock_is_wrong_shares_as_the_others(
    stored_in: Stored, server: ValkeyServer, off_min: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lifetimes are told as durations, and files get their times from the file system: no value dies early."""
    real = time.time

    async def scenario() -> None:
        async with Hosts(stored_in.open, tmp_path) as hosts:
            a, b = hosts.open(ttl_s=3600.0), hosts.open(ttl_s=3600.0)
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda: real() + 60 * off_min)
                await stored(a, CHAIN)
            assert await found(b) == BLOCKS
            for name in server.ask("KEYS", "*").split():
                left_ms = int(server.ask("PTTL", name)[1:]) if name.startswith(b"tc1") else -1
                assert left_ms == -1 or 3_500_000 < left_ms <= 3_600_000

    play(scenario)


# --- the helper process --------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["hangs", "dies"])
@pytest.mark.parametrize("doing", ["a fetch", "a write"])
def test_a_helper_process_that_ends_or_hangs_lets_its_frames_go(
    end: str, doing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STEADY_S", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.02)
    (tmp_path / "kv").mkdir()
    folder, clock = StoredInFolder(tmp_path / "kv"), Clock()

    async def scenario() -> None:
        async with Hosts(folder.open, tmp_path) as hosts:
            a, b = hosts.open(), clock.of(hosts.open())
            helper: Any = b.settings.store
            stores: list[Any] = [one.settings.store for one in (a, b)]
            wait_until(lambda: all(one.stats()["ready"] for one in stores), "the helpers")
            await stored(a, CHAIN)
            await stored(b, OTHER)
            assert await b.look_up([b.namespace()], CHAIN) == BLOCKS
            pid = helper.stats()["pid"]
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: state_of(pid) == "T", "the helper to stop")
            with monkeypatch.context() as brief:
                if end == "hangs":
                    processes = helper.supervisor.processes
                    brief.setattr(processes, "limits", dataclasses.replace(processes.limits, hung_s=0.1))
                    brief.setattr(fetches, "FETCH_S", 0.2)
                    brief.setattr(write_job, "WRITE_S", 0.2)
                lease = None
                if doing == "a write":
                    b.store(b.namespace(), chain_of("z", BLOCKS))
                else:
                    lease = b.cache.match(b.owner, [b.namespace()], CHAIN, 60.0, promote=True).lease
                b.cache.work()
                assert b.cache.space.allocator._holders or not b.below.settled, "nothing is under way"
                if end == "dies":
                    os.kill(pid, signal.SIGKILL)
                await b.until(lambda: b.below.settled and not b.cache.space.allocator._holders)
            if lease is not None:
                # Nothing, or all where the thread that asks came so late that the next process was there.
                assert b.read(lease, [b.namespace()]) in (0, BLOCKS)
            b.check()
            while await found(b) < BLOCKS:  # until the next process has started
                await back(b, clock)
            assert helper.stats()["pid"] != pid

    play(scenario)


# --- coming and going ----------------------------------------------------------------------------


@played
async def test_a_store_that_comes_and_goes_floods_no_log_and_is_asked_seldom(
    server: ValkeyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tiercache.daemon")
    clock = Clock()
    with Relay(server.port) as relay:
        async with Hosts(lambda: open_store(relay.url), tmp_path) as hosts:
            b = clock.of(hosts.open())
            await stored(b, CHAIN)
            wants_probe, probes, lines = b.shared.breaker.wants_probe, list[float](), len(caplog.records)

            def probed() -> bool:
                if wants := wants_probe():
                    probes.append(clock())
                return wants

            b.shared.breaker.wants_probe = probed  # type: ignore[method-assign]
            for number in range(200):
                if number % 2:
                    relay.accept()
                else:
                    relay.refuse()
                for _ in range(5):
                    await b.look_up([b.namespace()], chain_of(f"gone{number}", 2))
                b.cache.work()
                await b.until(lambda: b.shared.breaker.state is not breaker.BreakerState.HALF_OPEN)
                clock.ahead_s += 1.0
            assert 2 < len(probes) <= 40, "in 200 s"
            assert len(caplog.records) - lines <= 2 * b.shared.breaker.opened, (
                "one line when it goes, one at its return"
            )
            if not relay.listens:
                relay.accept()
            await back(b, clock)
            assert await found(b) == BLOCKS


@played
async def test_the_return_of_a_store_under_load(server: ValkeyServer, tmp_path: Path) -> None:
    """It gets a small part of the work at first, more and more; nothing is wrong, and nothing is left waiting."""
    clock = Clock()
    with Relay(server.port) as relay:
        async with Hosts(lambda: open_store(server.url), tmp_path) as hosts:
            a, b = hosts.open(), clock.of(hosts.open(open_store(relay.url)))
            chains = [chain_of(f"c{number}", 16) for number in range(20)]
            await stored(a, *chains)
            await found(b, CHAIN)
            relay.refuse()
            for one in chains:
                assert await b.load([b.namespace()], one) == 0
            await b.until(lambda: not b.shared.breaker.closed)
            others = [chain_of(f"d{number}", 16) for number in range(20)]
            for one in others:
                b.store(b.namespace(), one)
            relay.accept()
            clock.ahead_s += 2 * breaker.FIRST_PAUSE_S
            await b.until(lambda: b.shared.breaker.closed)
            loads, submit = list[int](), b.shared._writes._submit
            most_bytes = REGION_BYTES * 4 * writes.HELD_SHARE
            first_bytes = list[int]()

            def submitted(job: WriteJob) -> None:
                since_s = clock() - b.shared.breaker._closed_s
                if since_s < RAMP_S / 10:
                    first_bytes.append(b.shared._writes.in_flight_bytes)
                submit(job)

            b.shared._writes._submit = submitted
            for _ in range(12):
                b.cache.work()
                for one in chains[:2]:
                    b.shared.presence.forget()
                    b.forget_dram(one[:16])
                    loads.append(await b.load([b.namespace()], one))
                clock.ahead_s += RAMP_S / 10
            assert loads[-2:] == [16] * 2
            assert first_bytes
            assert max(first_bytes) <= most_bytes / 10 + BLOCK_BYTES
            await b.sent()
            b.forget_dram()
            for one in others:
                b.store(b.namespace(), one)
            await b.sent()
            for one in others:
                assert await a.load([a.namespace()], one) == 16
            assert b.shared.source.tally.bad_blocks == 0
