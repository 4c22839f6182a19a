"""Everything at once: clients at random against a tiny arena, while the daemon and clients die and come back."""

from __future__ import annotations

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
from fault_processes import Child, Daemon
from waiting import wait_until

SETTINGS = {"block_bytes": 64 << 10, "blocks": 32, "request_timeout_s": 0.3}
TINY = ("--arena", "4MiB", "--region", "2MiB")
NVME = ("--nvme-size", "32MiB", "--nvme-segment", "2MiB", "--grace", "1s")


def check(daemon: Daemon) -> None:
    """No client holds anything any more, and the daemon's books agree."""
    wait_until(lambda: _quiet(daemon.stats()), f"all leases are over: {daemon.stats()['leases']}", 60)
    stats = daemon.stats()
    assert stats["health"]["state"] == "ok", stats["health"]
    for name in ("invariant_failures", "requests_failed", "requests_malformed"):
        assert stats["counters"][name] == 0, (name, daemon.log())
    assert "Traceback" not in daemon.log(), daemon.log()
    # What was flushed, and what the last leases had, is given back a slice at a time.
    wait_until(lambda: _unowned_bytes(daemon.stats()) == 0, "every frame in use is a block's", 60)


def _unowned_bytes(stats: dict[str, Any]) -> int:
    used_bytes: int = stats["arena"]["used_bytes"]
    return used_bytes - sum(one["blocks"] * one["block_bytes"] for one in stats["namespaces"])


def _quiet(stats: dict[str, dict[str, int]]) -> bool:
    leases = stats["leases"]
    return not (leases["read"] or leases["write"] or leases["quarantined"] or leases["pending_blocks"])


def churn(
    start_child: Callable[..., Child], daemon: Daemon, seed: int, seconds: float, clients: int = 2
) -> tuple[list[Child], Callable[[], list[dict[str, int]]]]:
    """Start clients at random work; the second value waits for what they say.

    The third one does not map the arena, the fourth has blocks of another size.
    """
    forms: list[dict[str, object]] = [{}, {}, {"map_arena": False}, {"block_bytes": 16 << 10}]
    children = [start_child("engine", daemon, **{**SETTINGS, "required": False, **form}) for form in forms[:clients]]
    for number, child in enumerate(children):
        child.tell("churn", seed=1000 * seed + number, seconds=seconds, chains=5, longest=24, flush=True)
    return children, lambda: [child.hear(seconds + 30) for child in children]


def chaos(daemon: Daemon, dice: random.Random, seconds: float, kills: int) -> None:
    """Kill -9 and restart the daemon some times, or only stop it for a moment."""
    pause_s = seconds / (kills + 1)
    for _ in range(kills):
        end_s = time.monotonic() + pause_s * dice.uniform(0.7, 1.0)
        wait_until(lambda e=end_s: time.monotonic() > e, "work in between", seconds + 1)
        if dice.random() < 0.25:
            daemon.stop()
            daemon.go_on()
        daemon.restart()


@pytest.mark.parametrize("seed", [1])
def test_clients_at_random_while_the_daemon_dies_again_and_again(
    start_daemon: Callable[..., Daemon], start_child: Callable[..., Child], engine_of: Callable[..., Engine], seed: int
) -> None:
    daemon = start_daemon(*TINY)
    _, results = churn(start_child, daemon, seed, seconds=6)
    chaos(daemon, random.Random(seed), 5, kills=3)
    totals = results()
    assert all(total["stored"] > 0 and total["good"] > 0 for total in totals), totals
    engine = engine_of(daemon, spec_of(64 << 10))
    assert engine.store(chain_of("after", 20)).dropped == 0
    assert engine.load(chain_of("after", 20)) == 20
    check(daemon)


@pytest.mark.stress
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [30])
def test_clients_at_random_while_the_daemon_and_its_worker_processes_die(
    start_daemon: Callable[..., Daemon], start_child: Callable[..., Child], tmp_path: Path, seed: int
) -> None:
    """Loads come from NVMe, too, by way of processes that are killed or stopped, or lose the daemon."""
    dirs = ",".join(str(tmp_path / name) for name in "ab")
    daemon = start_daemon(*TINY, "--nvme", dirs, *NVME, "--nvme-workers", "on")
    _, results = churn(start_child, daemon, seed, seconds=20)
    dice, ends_s, kills, promoted = random.Random(seed), time.monotonic() + 19, 0, 0
    while time.monotonic() < ends_s and kills < 15:
        moment_s = time.monotonic() + dice.uniform(0.1, 0.8)
        wait_until(lambda m=moment_s: time.monotonic() > m, "work in between")
        nvme = daemon.stats()["tiers"]["nvme"]
        promoted = max(promoted, nvme["promoted_blocks"])
        if dice.random() < 0.2:
            daemon.restart()
            continue
        pids = [one["worker_pid"] for one in nvme["directories"] if one["worker_pid"]]
        for pid in dice.sample(pids, min(1, len(pids))):
            if dice.random() < 0.3:
                os.kill(pid, signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
            kills += 1
    assert all(total["good"] > 0 for total in results())
    assert kills > 1
    assert promoted > 0
    wait_until(lambda: daemon.stats()["health"]["state"] == "ok", "both directories are open", 60)
    check(daemon)


@pytest.mark.stress
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(2, 8))
def test_clients_at_random_for_longer(
    start_daemon: Callable[..., Daemon], start_child: Callable[..., Child], seed: int
) -> None:
    daemon = start_daemon(*TINY)
    _, results = churn(start_child, daemon, seed, seconds=25, clients=4)
    chaos(daemon, random.Random(seed), 23, kills=8)
    assert all(total["good"] > 0 for total in results())
    check(daemon)


@pytest.mark.parametrize("seed", [11])
def test_clients_that_die_at_random_leave_nothing_behind(
    start_daemon: Callable[..., Daemon], start_child: Callable[..., Child], seed: int
) -> None:
    """kill -9 and SIGSTOP of clients in the middle of stores and loads; the others never see a wrong byte."""
    daemon = start_daemon(*TINY)
    dice = random.Random(seed)
    children, results = churn(start_child, daemon, seed, seconds=3, clients=2)
    victims: list[Child] = []
    for _ in range(7):
        victim = start_child("engine", daemon, required=False, **SETTINGS)
        victims.append(victim)
        victim.tell("churn", seed=dice.randrange(1 << 30), seconds=60, chains=5, longest=24, flush=False)
        moment_s = time.monotonic() + dice.uniform(0.02, 0.25)
        wait_until(lambda m=moment_s: time.monotonic() > m, "the client has been at work for a moment")
        if dice.random() < 0.3:
            victim.stop()
        os.kill(victim.pid, signal.SIGKILL)
    assert all(total["good"] > 0 for total in results())
    for child in (*children, *victims):
        child.close()
    check(daemon)


@pytest.mark.stress
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(20, 24))
def test_eviction_never_reuses_what_is_read(
    start_daemon: Callable[..., Daemon], start_child: Callable[..., Child], seed: int
) -> None:
    daemon = start_daemon(*TINY)
    _, results = churn(start_child, daemon, seed, seconds=20, clients=4)
    assert all(total["good"] > 0 for total in results())
    check(daemon)
