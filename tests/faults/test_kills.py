"""Daemons, clients and forks that are killed at any moment: misses, then hits again, and nothing is left behind.

A frame that was given to a writer goes to no other client until the writer has said that it is done, or its process
has exited.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_engine import Engine
from fault_peer import Peer
from fault_processes import Child, Daemon
from waiting import state_of, wait_until

from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

SPEC = spec_of(64 << 10)
WIDE = spec_of(256 << 10)
FRAMES = 16
TAKEN = 5
_fresh = itertools.count()


# --- daemons ----------------------------------------------------------------------------------------


def test_a_killed_daemon_is_a_miss_and_its_restart_a_hit(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    """Also with other regions and another arena: nothing of the old life is taken for the new one."""
    engine, other, keys = engine_of(daemon, SPEC), engine_of(daemon, spec_of(8192, rank=1)), chain_of("before", 20)
    for flags in (daemon.flags, ("--arena", "6MiB", "--region", "2MiB")):
        engine.store(keys)
        assert engine.load(keys) == 20
        daemon.kill()
        engine.misses(keys)
        wait_until(lambda: not engine.connector.available, "the client knows that it is down")
        daemon.flags = flags
        daemon.start()
        for one in (other, engine):  # so that the namespaces have other numbers now
            wait_until(lambda one=one: one.connector.available, "the client comes back without a call")
            assert one.load(keys) == 0, "the new daemon has nothing yet"
            wait_until(lambda one=one: one.store(keys).dropped == 0, "stores are taken again")
            assert one.load(keys) == 20


def test_the_memory_of_a_killed_daemon_is_unmapped_though_a_match_is_held(
    daemon: Daemon, start_child: Callable[..., Child]
) -> None:
    child = start_child("engine", daemon, block_bytes=SPEC.block_bytes)
    child.do("store", seed="x", blocks=4)
    assert child.do("hold", seed="x", blocks=4) == 4
    wait_until(lambda: child.do("mapped_regions") == 4, "all regions are mapped")
    daemon.kill()
    wait_until(lambda: child.do("mapped_regions") == 0, "the dead daemon's regions are unmapped")
    daemon.start()
    wait_until(lambda: child.do("mapped_regions") == 4, "the new ones are mapped")
    assert child.do("load_held", seed="x") == 0
    wait_until(lambda: child.do("store", seed="x", blocks=4)[2] == 0, "stores are taken again")
    assert child.do("load", seed="x", blocks=4) == 4


# --- writers ----------------------------------------------------------------------------------------


@pytest.fixture
def small(start_daemon: Callable[..., Daemon]) -> Daemon:
    """Sixteen frames, all of which one client may have in quarantine."""
    return start_daemon("--arena", "4MiB", "--region", "2MiB", "--quarantine-per-client", "4MiB")


def press(peer: Peer, expect: int) -> tuple[bytes, set[int]]:
    """Store new chains of 16 blocks; each must get exactly the `expect` frames that are not taken."""
    given: set[int] = set()
    for _ in range(3):
        keys = chain_of(f"pressure {next(_fresh)}", FRAMES)
        frames = peer.store_chain(WIDE, keys)
        assert len(frames) == expect
        given.update(frames)
    assert len(given) == expect, "the same frames each time: there are no others"
    return keys, given


def all_back(peer: Peer) -> None:
    """All 16 frames can be had again, and nothing of the half-written chain is found."""
    wait_until(lambda: len(peer.store_chain(WIDE, chain_of(f"back {next(_fresh)}", FRAMES))) == FRAMES, "all are back")
    stats = peer.stats()
    assert (stats["arena"]["quarantined_bytes"], stats["leases"]["quarantined"]) == (0, 0)
    assert stats["health"]["state"] == "ok"
    assert peer.match_chain(WIDE, chain_of("half", TAKEN)).dram_blocks == 0


@pytest.mark.parametrize("how", ["killed", "killed, with a fork", "hangs up", "stopped"])
def test_frames_of_a_writer_wait_for_the_end_of_its_process_or_its_word(
    small: Daemon,
    start_child: Callable[..., Child],
    connect: Callable[..., Peer],
    kill_later: Callable[[int], None],
    how: str,
) -> None:
    child, other = start_child("peer", small, block_bytes=WIDE.block_bytes), connect(small)
    taken = child.do("reserve", seed="half", blocks=TAKEN, ttl_ms=100 if how == "stopped" else 30_000)["frames"]
    child.do("fill", first=0, count=TAKEN - 2)
    if how == "killed, with a fork":  # which keeps the sockets open: only the writer's pidfd shows that it is dead
        fork = child.do("fork")
        kill_later(fork)
    elif how == "hangs up":
        child.do("hang_up")
        wait_until(lambda: other.stats()["arena"]["quarantined_bytes"] > 0, "its frames are set aside")
    elif how == "stopped":
        child.stop()
        wait_until(lambda: other.stats()["leases"]["quarantined"] == 1, "its lease is over")
    keys, given = press(other, FRAMES - TAKEN)
    assert not given & set(taken)
    if how == "stopped":
        child.go_on()
    if how in ("hangs up", "stopped"):
        child.do("scribble")
        assert other.load_chain(WIDE, keys) == FRAMES - TAKEN, "the late write landed in no other block"
    if how == "stopped":
        assert child.do("commit") == [m.CommitState.DROPPED] * TAKEN, "its word: the copies are over"
    else:
        child.kill()
    all_back(other)
    if how == "killed, with a fork":
        assert state_of(fork) in ("S", "R"), "the fork lives and holds the session socket"


# --- everything at once -----------------------------------------------------------------------------


SETTINGS = {"block_bytes": 64 << 10, "blocks": 32, "request_timeout_s": 0.3, "required": False}
TINY = ("--arena", "4MiB", "--region", "2MiB")
NVME = ("--nvme-size", "32MiB", "--nvme-segment", "2MiB", "--grace", "1s")


def check(daemon: Daemon) -> None:
    """No client holds anything any more, and the daemon's books agree."""

    def unowned_bytes() -> int:
        stats = daemon.stats()
        return int(stats["arena"]["used_bytes"]) - sum(
            one["blocks"] * one["block_bytes"] for one in stats["namespaces"]
        )

    def held() -> list[int]:
        leases = daemon.stats()["leases"]
        return [leases[name] for name in ("read", "write", "quarantined", "pending_blocks")]

    wait_until(lambda: not any(held()), "all leases are over")
    wait_until(lambda: unowned_bytes() == 0, "every frame in use is a block's")
    stats = daemon.stats()
    assert stats["health"]["state"] == "ok", stats["health"]
    for name in ("invariant_failures", "requests_failed", "requests_malformed"):
        assert stats["counters"][name] == 0, (name, daemon.log())
    assert "Traceback" not in daemon.log(), daemon.log()


def churn(start_child: Callable[..., Child], daemon: Daemon, seed: int, seconds: float, count: int) -> list[Child]:
    """Clients at random work, which verify every byte; the second one sends payloads."""
    children = [start_child("engine", daemon, **{**SETTINGS, "map_arena": number != 1}) for number in range(count)]
    for number, child in enumerate(children):
        child.tell("churn", seed=1000 * seed + number, seconds=seconds, chains=5, longest=24, flush=True)
    return children


def moments(dice: random.Random, seconds: float, shortest: float, longest: float) -> Any:
    """Random moments for so many seconds."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        moment_s = time.monotonic() + dice.uniform(shortest, longest)
        wait_until(lambda: time.monotonic() > moment_s, "work in between")  # noqa: B023 - called at once
        yield


@pytest.mark.timeout(240)
@pytest.mark.parametrize("workers", [False, True], ids=["dram", "nvme workers"])
def test_clients_at_random_while_the_daemon_and_its_worker_processes_die(
    start_daemon: Callable[..., Daemon],
    start_child: Callable[..., Child],
    engine_of: Callable[..., Engine],
    tmp_path: Path,
    workers: bool,
) -> None:
    nvme = ("--nvme", f"{tmp_path}/a,{tmp_path}/b", *NVME, "--nvme-workers", "on") if workers else ()
    daemon, dice = start_daemon(*TINY, *nvme), random.Random(30)
    children, kills = churn(start_child, daemon, 30, 16, 3), 0
    for _ in moments(dice, 14, 0.3, 1.2):
        if not workers or dice.random() < 0.25:
            daemon.restart()
            continue
        directories = daemon.stats()["tiers"]["nvme"]["directories"]
        pids = [one["worker_pid"] for one in directories if one["worker_pid"]]
        for pid in dice.sample(pids, min(1, len(pids))):
            if dice.random() < 0.3:
                os.kill(pid, signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
            kills += 1
    assert all(child.hear()["good"] > 0 for child in children)
    assert kills > 1 or not workers
    wait_until(lambda: daemon.stats()["health"]["state"] == "ok", "both directories are open")
    engine = engine_of(daemon, spec_of(64 << 10))
    wait_until(lambda: engine.store(chain_of("after", 20)).dropped == 0, "stores are taken")
    assert engine.load(chain_of("after", 20)) == 20
    check(daemon)


def test_clients_that_die_at_random_leave_nothing_behind(
    start_daemon: Callable[..., Daemon], start_child: Callable[..., Child]
) -> None:
    """kill -9 and SIGSTOP of clients in the middle of stores and loads; the others never see a wrong byte."""
    daemon, dice = start_daemon(*TINY), random.Random(11)
    children, victims = churn(start_child, daemon, 11, 5, 2), []
    for _ in range(7):
        victims.append(victim := start_child("engine", daemon, **SETTINGS))
        victim.tell("churn", seed=dice.randrange(1 << 30), seconds=60, chains=5, longest=24, flush=False)
        next(moments(dice, 1, 0.02, 0.25))
        if dice.random() < 0.3:
            victim.stop()
        os.kill(victim.pid, signal.SIGKILL)
    assert all(child.hear()["good"] > 0 for child in children)
    for child in (*children, *victims):
        child.close()
    check(daemon)
