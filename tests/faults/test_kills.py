"""Daemons, clients and forks that hang or are killed: misses, then hits again, and nothing is left behind."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
from chains import chain_of
from fault_engine import Engine, spec_of
from fault_peer import Peer
from fault_processes import Child, Daemon
from waiting import hurried, state_of, wait_until

from tiercache.config.daemon_config import session_socket_path
from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

SPEC = spec_of(64 << 10)
WIDE = spec_of(256 << 10)
FRAMES = 16
TAKEN = 5
_fresh = itertools.count()


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
    small: Daemon, start_child: Callable[..., Child], connect: Callable[..., Peer], closing: ExitStack, how: str
) -> None:
    child, other = start_child("peer", small, block_bytes=WIDE.block_bytes), connect(small)
    taken = child.do("reserve", seed="half", blocks=TAKEN, ttl_ms=100 if how == "stopped" else 30_000)
    child.do("fill", count=TAKEN - 2)
    if how == "killed, with a fork":  # which keeps the sockets open: only the writer's pidfd shows that it is dead
        fork = child.do("fork")
        closing.callback(os.kill, fork, signal.SIGKILL)
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


SETTINGS = {"block_bytes": 64 << 10, "blocks": 32, "request_timeout_s": 0.3, "required": False}
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
    for name in ("broken_chains", "requests_failed", "requests_malformed"):
        assert stats["counters"][name] == 0, (name, daemon.log())
    assert "Traceback" not in daemon.log(), daemon.log()


@pytest.mark.parametrize("workers", [False, True], ids=["dram", "nvme workers"])
def test_clients_at_random_while_the_daemon_its_workers_and_other_clients_die(
    start_daemon: Callable[..., Daemon],
    start_child: Callable[..., Child],
    engine_of: Callable[..., Engine],
    tmp_path: Path,
    workers: bool,
) -> None:
    """Every byte is verified, of the second client's payloads too. In the end nothing is left behind."""
    nvme = ("--nvme", f"{tmp_path}/a,{tmp_path}/b", *NVME, "--nvme-workers", "on") if workers else ()
    daemon, dice = start_daemon("--arena", "4MiB", "--region", "2MiB", *nvme), random.Random(30)

    def client(seconds: float, map_arena: bool = True) -> Child:
        child = start_child("engine", daemon, **SETTINGS, map_arena=map_arena)
        child.tell("churn", seed=dice.randrange(1 << 30), seconds=seconds, chains=5, longest=24, flush=seconds < 60)
        return child

    def workers_of() -> list[int]:
        directories = daemon.stats()["tiers"]["nvme"]["directories"]
        return [one["worker_pid"] for one in directories if one["worker_pid"]]

    children, victims = [client(16, number != 1) for number in range(3)], [client(60)]
    for what in ("worker" if workers else "daemon", "client", "worker" if workers else "client", "daemon") * 4:
        moment_s = time.monotonic() + dice.uniform(0.3, 1.2)
        wait_until(lambda: time.monotonic() > moment_s, "work in between")  # noqa: B023 - called at once
        if what == "daemon":
            daemon.restart()
        elif what == "client":
            if dice.random() < 0.3:
                victims[-1].stop()
            victims[-1].kill()
            victims.append(client(60))
        else:
            pid = dice.choice(wait_until(workers_of, "a worker lives"))
            if dice.random() < 0.3:
                os.kill(pid, signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
    assert all(child.hear()["good"] > 0 for child in children)
    wait_until(lambda: daemon.stats()["health"]["state"] == "ok", "both directories are open")
    engine = engine_of(daemon, spec_of(64 << 10))
    wait_until(lambda: engine.store(chain_of("after", 20)).dropped == 0, "stores are taken")
    assert engine.load(chain_of("after", 20)) == 20
    for child in (*children, *victims):
        child.close()
    check(daemon)


@pytest.mark.parametrize("dies", [False, True])
def test_a_daemon_that_hangs_is_a_miss(daemon: Daemon, engine_of: Callable[..., Engine], dies: bool) -> None:
    engine, keys = engine_of(daemon, SPEC), chain_of("before", 20)
    engine.store(keys)
    daemon.stop()
    with hurried(engine.connector.client):
        engine.misses(keys)
    engine.misses(keys)
    if dies:
        daemon.restart()
    else:
        daemon.go_on()
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    assert engine.load(keys) == (0 if dies else 20), "it was only asleep"
    wait_until(lambda: engine.store(keys).dropped == 0, "stores are taken again")


def test_an_engine_that_hangs_does_not_hold_its_leases_for_ever(
    start_daemon: Callable[..., Daemon], engine_of: Callable[..., Engine], start_child: Callable[..., Child]
) -> None:
    """Its renewals stop with it. After SIGCONT its match is a miss, and all goes on."""
    daemon = start_daemon("--arena", "16MiB", "--region", "4MiB", "--lease-ttl-max", "500ms")
    child = start_child("engine", daemon, block_bytes=256 << 10)
    engine = engine_of(daemon, spec_of(256 << 10))
    child.do("store", seed="held", blocks=60)
    assert child.do("hold", seed="held", blocks=60) == 60
    child.stop()
    numbers = iter(range(10**6))
    wait_until(lambda: engine.store(chain_of(next(numbers), 64)).stored == 64, "all frames can be had")
    child.go_on()
    assert child.do("load_held", seed="held") == 0
    child.do("store", seed="held", blocks=60)
    assert child.do("load", seed="held", blocks=60) == 60


def test_renewals_that_waited_for_a_stopped_daemon_are_read_before_leases_are_judged(
    daemon: Daemon, connect: Callable[..., Peer]
) -> None:
    peer, keys = connect(daemon), chain_of("queue", 4)
    peer.store_chain(SPEC, keys)
    leases = [peer.match_chain(SPEC, keys, ttl_ms=1500).lease for _ in range(20)]
    daemon.stop()
    renewals = [peer.post(m.Renew, leases=[lease], ttl_ms=30_000, deadline_s=60) for lease in leases]
    end_s = time.monotonic() + 2
    wait_until(lambda: time.monotonic() > end_s, "more than the lease")
    daemon.go_on()
    assert all(list(peer.answer_to(request_id).alive) == [1] for request_id in renewals)
    assert all(peer.tell(m.Release, lease=lease).good for lease in leases)


def test_a_run_dir_that_others_may_write_is_refused(closing: ExitStack) -> None:
    daemon = Daemon("--arena", "4MiB")
    closing.callback(daemon.close)
    Path(daemon.run_dir).chmod(0o777)
    assert daemon.launch().status() == 2
    [line] = daemon.log().splitlines()
    assert "chmod 0700" in line


def test_signals_during_the_start_end_the_daemon(closing: ExitStack) -> None:
    """SIGTERM as soon as it answers: status 0, no traceback."""
    daemon = Daemon("--arena", "256MiB", "--region", "8MiB")
    closing.callback(daemon.close)
    assert daemon.start(complete=False).terminate() == 0
    assert "Traceback" not in daemon.log()


def test_28_requests_of_a_former_life_are_refused(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    """A DEALER keeps what was sent to a dead daemon, and brings it to the next one."""
    old, keys = connect(daemon), chain_of("former", 3)
    old.store_chain(SPEC, keys)
    daemon.kill()
    flush = old.post(m.Flush, tier="all", namespaces=[], key=b"", deadline_s=60)
    match = old.post(m.Match, namespaces=[1], keys=keys, ttl_ms=60_000, deadline_s=60)
    daemon.start()
    new = connect(daemon)
    new.store_chain(SPEC, keys)
    for request_id in (flush, match):
        reply = old.answer_to(request_id, 15)
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.STALE_GENERATION.value
        assert reply.generation == new.generation != old.generation
    assert new.load_chain(SPEC, keys) == 3, "the old life's flush did nothing"
    assert daemon.stats()["leases"]["read"] == 0
    stale = new.tell(m.Flush, generation=old.generation, tier="all", namespaces=[], key=b"")
    assert stale.code == m.ErrorCode.STALE_GENERATION.value
    assert new.load_chain(SPEC, keys) == 3


def test_7_a_second_daemon_at_one_run_dir_is_refused(
    daemon: Daemon, connect: Callable[..., Peer], closing: ExitStack
) -> None:
    peer, keys = connect(daemon), chain_of("first", 4)
    peer.store_chain(SPEC, keys)
    for _ in range(2):
        second = Daemon("--arena", "4MiB", run_dir=daemon.run_dir)
        closing.callback(second.close)
        assert second.launch().status() == 2
        lines = second.log().splitlines()
        assert len(lines) == 1, second.log()
        assert f"pid {daemon.pid}" in lines[0]
        assert "--run-dir" in lines[0]
    assert peer.load_chain(SPEC, keys) == 4
    assert connect(daemon).load_chain(SPEC, keys) == 4, "the sockets are still the first one's"


# --- memory and descriptors: seals, an arena that does not fit, floods of connections ----------------


MIB = 1 << 20
_F_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1033, 2, 4, 8
encode = msgspec.msgpack.encode


def regions_of(peer: Peer, count: int) -> list[tuple[int, int]]:
    """Descriptor and size of each of the first regions that a client is sent."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        message, fds = peer.session.receive()
        found += [(fd, size) for (_, size), fd in zip(message[1], fds, strict=True)]
    return found


def test_29_no_client_can_resize_a_region(daemon: Daemon, connect: Callable[..., Peer], closing: ExitStack) -> None:
    other, keys = connect(daemon), chain_of("sealed", 8)
    other.store_chain(SPEC, keys)
    for fd, size in regions_of(connect(daemon), 4):
        closing.callback(os.close, fd)
        assert size == os.fstat(fd).st_size == 4 * MIB
        for length in (0, 4096, size - 1, size + 1, 2 * size):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
        with pytest.raises(PermissionError):
            os.posix_fallocate(fd, size, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", size)
        with pytest.raises(PermissionError):  # nor make it read-only for the others
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_WRITE)
    assert other.load_chain(SPEC, keys) == 8


def test_43_a_daemon_out_of_descriptors_serves_those_it_has(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], closing: ExitStack
) -> None:
    """The daemon's own limits leave it enough descriptors; here the test lowers the limit under it."""
    daemon = start_daemon("--arena", "8MiB", "--region", "4MiB")
    peer, keys = connect(daemon), chain_of("files", 8)
    assert peer.load_chain(SPEC, keys) == 0  # its connection is made
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (48, 48))
    peer.store_chain(SPEC, keys)
    others: list[socket.socket] = []
    for _ in range(60):
        sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.connect(str(session_socket_path(daemon.run_dir)))
        others.append(sock)
    wait_until(lambda: "could not be accepted" in daemon.log(), "the daemon is out of descriptors")
    for _ in range(200):
        assert peer.load_chain(SPEC, keys) == 8
    assert daemon.log().count("could not be accepted") < 20, "the loop does not spin"
    for sock in others:
        sock.close()
    wait_until(lambda: _lets_in(daemon), "it lets others in again")


def _lets_in(daemon: Daemon) -> bool:
    try:
        with Peer(daemon.run_dir) as peer:
            return isinstance(peer.tell(m.Ping), m.Done)
    except (OSError, AssertionError, msgspec.MsgspecError):
        return False


def test_a_lack_of_memory_is_said_and_survived(
    start_daemon: Callable[..., Daemon], engine_of: Callable[..., Engine], closing: ExitStack
) -> None:
    """No region fits: a line that says what to do, a daemon that answers, and an engine that goes on."""
    nothing_left = "from tiercache.copies import arena\narena._memory = lambda: iter([arena._Memory(0, 0, 'here')])"
    daemon = Daemon("--arena", "32MiB", "--region", "16MiB", patch=nothing_left)
    closing.callback(daemon.close)
    daemon.start(complete=False)
    wait_until(lambda: "make the arena smaller" in daemon.log(), "the log says what to do")
    engine, keys = engine_of(daemon, SPEC), chain_of("no room", 8)
    assert engine.store(keys) == (0, 0, 8, False)
    assert engine.load(keys) == 0
    stats = daemon.stats()
    assert stats["health"]["state"] == "degraded"
    assert "make the arena smaller" in stats["health"]["reasons"][0]
    assert stats["arena"]["populated_bytes"] == 0
    assert stats["arena"]["bytes"] == 32 * MIB


def test_24_connections_to_the_control_socket_never_take_the_last_descriptor(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], closing: ExitStack
) -> None:
    """ZeroMQ aborts without one. As fast as can be, and with few: what it accepts unseen is bounded too."""
    files = 1400

    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, {files}))"
    daemon = start_daemon("--arena", "16MiB", "--region", "16MiB", patch=limit)
    peer = connect(daemon)
    assert isinstance(peer.tell(m.Ping), m.Done)  # a request on a connection that was never heard may be lost with it
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2 * files), hard), hard))
    closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    deadline_s = time.monotonic() + 45
    for _ in range(files + 100):
        sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setblocking(False)
        while True:
            assert time.monotonic() < deadline_s
            with suppress(BlockingIOError):
                sock.connect(peer.control.removeprefix("ipc://"))
                break
    assert isinstance(peer.tell(m.Ping), m.Done)
    assert f"may open {files} files" in daemon.log(), "the log says that it admits fewer than configured"
    with connect(daemon) as late:
        assert isinstance(late.tell(m.Ping), m.Done)
