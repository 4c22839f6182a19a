"""Faults 29, 43 and what concerns memory: seals, descriptors, an arena that does not fit, garbage as replies."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_engine import Engine
from fault_messages import DEEP
from fault_peer import Peer
from fault_processes import Child, Daemon, open_fds
from fault_relay import Relay
from waiting import wait_until

from tiercache.config.daemon_config import session_socket_path
from tiercache.copies.arena import Region, create_region
from tiercache.errors import ArenaError, ProtocolError
from tiercache.protocol import messages as m
from tiercache.protocol.wire import receive_packet, send_packet

MIB = 1 << 20
_F_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1033, 2, 4, 8
SPEC = spec_of(64 << 10)
encode = msgspec.msgpack.encode


def regions_of(peer: Peer, count: int) -> list[tuple[int, int]]:
    """Descriptor and size of each of the first regions that a client is sent."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        found += [(fd, size) for (_, size), fd in peer.next_regions()]
    return found


def test_29_no_client_can_shrink_or_grow_a_region(
    daemon: Daemon, connect: Callable[..., Peer], closing: ExitStack
) -> None:
    other, keys = connect(daemon), chain_of("sealed", 8)
    other.store(SPEC, keys)
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
    assert other.load(SPEC, keys) == 8


def sealed_memfd(seals: int, size: int = 2 * MIB) -> int:
    """A memfd that may lack what a region has."""
    fd = os.memfd_create("fault", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    if seals:
        fcntl.fcntl(fd, _F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("seals", [0, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE])
def test_29_a_region_that_could_shrink_is_not_mapped(seals: int, closing: ExitStack) -> None:
    fd = sealed_memfd(seals)
    closing.callback(os.close, fd)
    with pytest.raises(ArenaError, match="refused"):
        Region(0, fd, 2 * MIB)


def test_29_a_region_of_another_size_is_not_mapped(closing: ExitStack) -> None:
    fd = create_region(2 * MIB)
    closing.callback(os.close, fd)
    for size in (MIB, 4 * MIB):
        with pytest.raises(ArenaError, match="refused"):
            Region(0, fd, size)


@pytest.mark.parametrize("kind", ["file", "pipe", "socket"])
def test_29_what_is_no_memory_is_not_mapped(kind: str, tmp_path: Path, closing: ExitStack) -> None:
    if kind == "file":
        (tmp_path / "file").write_bytes(bytes(2 * MIB))
        fd = os.open(tmp_path / "file", os.O_RDWR)
    elif kind == "pipe":
        fd, other = os.pipe()
        closing.callback(os.close, other)
    else:
        fd = socket.socket(socket.AF_UNIX).detach()
    closing.callback(os.close, fd)
    with pytest.raises(ArenaError):
        Region(0, fd, os.fstat(fd).st_size)


@pytest.mark.parametrize("case", ["unsealed", "a file", "too few"])
def test_29_a_client_does_not_use_an_arena_that_it_cannot_trust(
    daemon: Daemon, engine_of: Callable[..., Engine], closing: ExitStack, tmp_path: Path, case: str
) -> None:
    """Misses, no mapping and no exception; hits again once the right daemon answers."""
    relay = closing.enter_context(Relay(daemon.run_dir))

    def replacements(fds: list[int]) -> list[int]:
        if case == "too few":
            return fds[1:]
        if case == "unsealed":
            return [sealed_memfd(0, 4 * MIB) for _ in fds]
        (tmp_path / "file").write_bytes(bytes(4 * MIB))
        return [os.open(tmp_path / "file", os.O_RDWR) for _ in fds]

    relay.replace_fds = replacements
    engine = engine_of(relay.run_dir, SPEC, required=False)
    keys = chain_of("distrust", 6)
    for _ in range(3):
        assert engine.store(keys).stored == 0
        assert engine.load(keys) == 0
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:fault" in line]
    relay.replace_fds = lambda fds: fds
    wait_until(lambda: engine.connector.available, "the client maps what can be trusted")
    wait_until(lambda: engine.store(keys) and engine.load(keys) == 6, "there are hits")


def test_43_more_regions_than_fit_into_a_message(
    start_daemon: Callable[..., Daemon], engine_of: Callable[..., Engine], connect: Callable[..., Peer]
) -> None:
    daemon = start_daemon("--arena", "80MiB", "--region", "2MiB")
    before = open_fds(os.getpid())
    peer = connect(daemon)
    for number in range(5):
        peer.store(spec_of(MIB), chain_of(f"many {number}", 16))
    assert len(peer.regions) == 40
    spec = spec_of(MIB)
    engine = engine_of(daemon, spec)
    assert sum(engine.load(chain_of(f"many {number}", 16)) for number in range(5)) == 80
    wait_until(lambda: open_fds(os.getpid()) < before + 30, "descriptors are closed once they are mapped")


@contextmanager
def few_files(spare: int) -> Iterator[None]:
    """Only so many descriptors more may be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_43_a_receiver_out_of_descriptors_says_so(closing: ExitStack) -> None:
    """The kernel hands over as many as fit and drops the others without an error of its own."""
    ours, theirs = (closing.enter_context(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    fds = [os.dup(0) for _ in range(16)]
    for fd in fds:
        closing.callback(os.close, fd)
    before = open_fds(os.getpid())
    for spare in (0, 1, 7, 15):
        send_packet(ours, b"regions", fds)
        with few_files(spare), pytest.raises(ProtocolError, match="open files"):
            receive_packet(theirs)
        assert open_fds(os.getpid()) <= before, "those that came are closed again"
    send_packet(ours, b"regions", fds)
    data, got = receive_packet(theirs)
    for fd in got:
        os.close(fd)
    assert (data, len(got)) == (b"regions", 16)


def test_43_more_descriptors_than_allowed_are_no_packet(closing: ExitStack) -> None:
    ours, theirs = (closing.enter_context(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    fds = [os.dup(0) for _ in range(200)]
    for fd in fds:
        closing.callback(os.close, fd)
    before = open_fds(os.getpid())
    for count in (17, 100, 200):
        socket.send_fds(ours, [b"many"], fds[:count])
        with pytest.raises(ProtocolError):
            receive_packet(theirs)
        assert open_fds(os.getpid()) <= before


def test_43_an_engine_out_of_descriptors_runs_without_its_cache(
    start_daemon: Callable[..., Daemon], start_child: Callable[..., Child]
) -> None:
    daemon = start_daemon("--arena", "40MiB", "--region", "2MiB")
    child = start_child("engine", daemon, spare_files=12, required=False)
    assert child.do("store", seed="x", blocks=4)[0] == 0
    assert child.do("load", seed="x", blocks=4) == 0
    child.do("more_files")
    wait_until(lambda: child.do("available"), "with descriptors there is a cache")
    wait_until(
        lambda: child.do("store", seed="x", blocks=4) and child.do("load", seed="x", blocks=4) == 4,
        "there are hits",
    )


def test_43_a_daemon_out_of_descriptors_serves_those_it_has(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], closing: ExitStack
) -> None:
    """The daemon's own limits leave it enough descriptors; here the test lowers the limit under it."""
    daemon = start_daemon("--arena", "8MiB", "--region", "4MiB")
    peer, keys = connect(daemon), chain_of("files", 8)
    assert peer.load(SPEC, keys) == 0  # its connection is made
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (48, 48))
    peer.store(SPEC, keys)
    others: list[socket.socket] = []
    for _ in range(60):
        sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.connect(str(session_socket_path(daemon.run_dir)))
        others.append(sock)
    wait_until(lambda: "could not be accepted" in daemon.log(), "the daemon is out of descriptors")
    for _ in range(200):
        assert peer.load(SPEC, keys) == 8
    assert daemon.log().count("could not be accepted") < 20, "the loop does not spin"
    for sock in others:
        sock.close()
    wait_until(lambda: _lets_in(daemon), "it lets others in again")


def _lets_in(daemon: Daemon) -> bool:
    try:
        with Peer(daemon.run_dir) as peer:
            return isinstance(peer.ask(m.Ping), m.Done)
    except (OSError, AssertionError, msgspec.MsgspecError):
        return False


def test_a_lack_of_memory_is_said_and_survived(
    start_daemon: Callable[..., Daemon], engine_of: Callable[..., Engine], closing: ExitStack
) -> None:
    """No region fits: a line that says what to do, a daemon that answers, and an engine that goes on."""
    nothing_left = "import tiercache.copies.arena\ntiercache.copies.arena._memory = lambda: iter([(0, 0)])"
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


def test_an_arena_that_fits_in_part_is_used_in_part(
    start_daemon: Callable[..., Daemon], engine_of: Callable[..., Engine], closing: ExitStack
) -> None:
    """The daemon's address space is used up after a few regions; further attempts leave nothing behind."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (800 * MIB, 800 * MIB))

    daemon = Daemon("--arena", "4GiB", "--region", "64MiB", preexec=limit)
    closing.callback(daemon.close)
    daemon.start(complete=False)
    wait_until(lambda: daemon.stats()["health"]["state"] == "degraded", "the log reports the shortage")
    regions = daemon.stats()["arena"]["regions"]
    assert 0 < regions < 20
    engine, keys = engine_of(daemon, spec_of(MIB)), chain_of("less", 60)
    assert engine.store(keys).stored == 60
    assert engine.load(keys) == 60
    regions = daemon.stats()["arena"]["regions"]
    wait_until(lambda: memfds(daemon.pid) == regions, "nothing stays of a region that could not be mapped")
    assert daemon.running()


def memfds(pid: int) -> int:
    """Memory files that a process has open."""
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found += "memfd:" in os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
    return found


GARBAGE: dict[str, Callable[[bytes], list[bytes]]] = {
    "noise": lambda good: [b"\xc1\xc1\xc1"],
    "nothing": lambda good: [b""],
    "truncated": lambda good: [good[:-2]],
    "no text": lambda good: [b"\x95\xa5error\x01\x01\xa2\xff\xff\xa2\xff\xff"],
    "deep": lambda good: [b"\x94\xa4done\x01\x01" + DEEP],
    "another type": lambda good: [_as(good, m.StatsReply, stats={})],
    "more blocks than asked": lambda good: [_as(good, m.Matched, dram_blocks=10**6, below_blocks=0, lease=5)],
    "more shared than below": lambda good: [
        _as(good, m.Matched, dram_blocks=4, below_blocks=0, lease=5, shared_blocks=1)
    ],
    "fewer than none": lambda good: [_as(good, m.Matched, dram_blocks=-4, below_blocks=-1, lease=5)],
    "frames of no length": lambda good: [_as(good, m.Matched, dram_blocks=4, below_blocks=0, lease=5, frames=[b"123"])],
    "frames of no region": lambda good: [
        _as(good, m.Matched, dram_blocks=4, below_blocks=0, lease=5, frames=[b"\xff" * 32])
    ],
    "frames outside their region": lambda good: [
        _as(good, m.Matched, dram_blocks=4, below_blocks=0, lease=5, frames=[(4 * MIB - 1).to_bytes(8, "little") * 4])
    ],
    "lists for no namespace": lambda good: [
        _as(good, m.Matched, dram_blocks=4, below_blocks=0, lease=5, frames=[bytes(32)] * 9)
    ],
    "an unexpected payload": lambda good: [good, b"x" * 100],
}


def _as(good: bytes, kind: type[m.Reply], **fields: object) -> bytes:
    """A reply of another kind, with the ids of a good one."""
    reply = msgspec.msgpack.decode(good, type=m.AnyReply)
    return encode(kind(reply.request_id, reply.generation, **fields))


@pytest.fixture(scope="module")
def liar() -> Iterator[Relay]:
    """A relay that answers what it likes, before a daemon that serves all cases."""
    with ExitStack() as stack:
        daemon = Daemon("--arena", "16MiB", "--region", "4MiB")
        stack.callback(daemon.close)
        yield stack.enter_context(Relay(daemon.start().run_dir))


@pytest.mark.parametrize("case", sorted(GARBAGE))
def test_22_a_reply_that_makes_no_sense_is_a_miss(liar: Relay, engine_of: Callable[..., Engine], case: str) -> None:
    """Whichever reply is garbage: the engine gets no exception and no wrong byte, and the client recovers."""
    engine = engine_of(liar.run_dir, SPEC)
    for kind in (m.Match, m.Commit, m.Release):
        keys, other = chain_of(f"{case} {kind}", 4), chain_of(f"new {case} {kind}", 4)
        wait_until(lambda k=keys: engine.store(k).present == 4, "the chain is there")
        liar.mangle = lambda request, parts, k=kind: GARBAGE[case](parts[0]) if isinstance(request, k) else parts
        harmless = case == "an unexpected payload" or kind not in (m.Match, m.Release)
        with ExitStack() as hurry:
            if not harmless:
                hurry.enter_context(engine.hurried(0.3))
            assert engine.load(keys) == (0 if not harmless else 4), kind  # verifies every block that is reported good
            if harmless:
                hurry.enter_context(engine.hurried(0.3))
            engine.store(other)
            liar.mangle = lambda request, parts: parts
        wait_until(lambda: engine.connector.available, "the client has found the daemon again")
        wait_until(lambda k=keys: engine.load(k) == 4, "there are hits again")
        engine.load(other)
