"""A client made by hand: the session socket and one DEALER, with every byte in the test's hands.

It does what a client of the protocol may do, and also what it must not: it keeps frames that it
gave back, writes late, leaves replies unread and sends anything.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from typing import Any

import msgspec
import zmq
from chains import key_of
from fault_blocks import content

from tiercache.config.daemon_config import session_socket_path
from tiercache.copies.arena import Region
from tiercache.protocol import messages as m
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.protocol.wire import close_fds, receive_packet, send_packet

DEADLINE_S = 40.0
_ids = itertools.count(1)
_decode_packet = msgspec.msgpack.Decoder(m.SessionMessage).decode
_decode_reply = msgspec.msgpack.Decoder(m.AnyReply).decode


class NoAnswer(AssertionError):
    """Nothing came within the deadline."""


def readable(sock: socket.socket, timeout_s: float) -> bool:
    """Wait until there is something to read, an end of file included."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0, int(timeout_s * 1000))))


def open_session_socket(run_dir: str, timeout_s: float = DEADLINE_S) -> socket.socket:
    """A connected session socket that has said nothing yet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(session_socket_path(run_dir)))
    except BaseException:
        sock.close()
        raise
    return sock


def hello(instance: bytes, name: str = "peer", map_arena: bool = True, **changes: Any) -> bytes:
    """An encoded hello; `changes` replace fields."""
    fields: dict[str, Any] = {
        "protocol_min": m.OLDEST_PROTOCOL,
        "protocol_max": m.PROTOCOL,
        "instance": instance,
        "name": name,
        "clock_us": time.monotonic_ns() // 1000,
        "map_arena": map_arena,
    }
    return msgspec.msgpack.encode(m.Hello(**{**fields, **changes}))


class Peer:
    """One session with a daemon. Replies are matched by request id; others wait in `strays`."""

    def __init__(
        self,
        run_dir: str,
        *,
        name: str = "peer",
        instance: bytes | None = None,
        map_arena: bool = True,
        receive_hwm: int = 100_000,
    ) -> None:
        self.instance = instance or os.urandom(m.INSTANCE_BYTES)
        self.regions: dict[int, Region] = {}
        self.strays: list[tuple[m.AnyReply, list[bytes]]] = []
        self.sock = open_session_socket(run_dir)
        pidfd = os.pidfd_open(os.getpid())
        try:
            send_packet(self.sock, hello(self.instance, name, map_arena), [pidfd])
        finally:
            os.close(pidfd)
        data, fds = receive_packet(self.sock)
        close_fds(fds)
        answer = _decode_packet(data)
        assert isinstance(answer, m.Welcome), answer
        self.welcome = answer
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.set(zmq.LINGER, 0)
        self.dealer.set(zmq.SNDHWM, 100_000)
        self.dealer.set(zmq.RCVHWM, receive_hwm)
        self.dealer.connect(answer.control)

    # --- asking ----------------------------------------------------------------------------------

    def post(
        self,
        kind: type[m.Request],
        *,
        payload: bytes | None = None,
        deadline_s: float = DEADLINE_S,
        generation: int | None = None,
        session: bytes | None = None,
        **fields: Any,
    ) -> int:
        """Send a request and do not wait; its id."""
        request_id = next(_ids)
        deadline_us = time.monotonic_ns() // 1000 + int(deadline_s * 1e6)
        generation = self.welcome.generation if generation is None else generation
        request = kind(request_id, session or self.welcome.session, generation, deadline_us, **fields)
        parts = [msgspec.msgpack.encode(request), *([payload] if payload is not None else [])]
        self.dealer.send_multipart(parts, zmq.NOBLOCK)
        return request_id

    def receive(self, timeout_s: float = DEADLINE_S) -> tuple[m.AnyReply, list[bytes]]:
        """The next reply, whichever it answers, and its payload parts."""
        if not self.dealer.poll(timeout_s * 1000):
            raise NoAnswer(f"no reply in {timeout_s} s")
        parts = self.dealer.recv_multipart()
        return _decode_reply(parts[0]), parts[1:]

    def answer_to(self, request_id: int, timeout_s: float = DEADLINE_S) -> tuple[m.AnyReply, list[bytes]]:
        """The reply to one request."""
        for place, (reply, parts) in enumerate(self.strays):
            if reply.request_id == request_id:
                del self.strays[place]
                return reply, parts
        deadline_s = time.monotonic() + timeout_s
        while True:
            reply, parts = self.receive(max(0.0, deadline_s - time.monotonic()))
            if reply.request_id == request_id:
                return reply, parts
            self.strays.append((reply, parts))

    def ask(self, kind: type[m.Request], *, timeout_s: float = DEADLINE_S, **fields: Any) -> Any:
        """One request and its reply, an `Error` included."""
        return self.answer_to(self.post(kind, **fields), timeout_s)[0]

    def register(self, spec: NamespaceSpec) -> int:
        """The number of a namespace."""
        return int(self.ask(m.RegisterNamespace, spec=spec).namespace)

    def stats(self) -> dict[str, Any]:
        """The daemon's statistics."""
        stats: dict[str, Any] = self.ask(m.Stats).stats
        return stats

    # --- memory ----------------------------------------------------------------------------------

    def map(self, frames: list[int]) -> None:
        """Wait until the regions of these frames are mapped."""
        deadline_s = time.monotonic() + DEADLINE_S
        while any(frame >> m.REGION_SHIFT not in self.regions for frame in frames):
            if not readable(self.sock, deadline_s - time.monotonic()):
                raise NoAnswer("the regions of these frames were never announced")
            for (region_id, size), fd in self.next_regions():
                self.regions[region_id] = Region(region_id, fd, size)
                os.close(fd)

    def next_regions(self) -> list[tuple[tuple[int, int], int]]:
        """One packet of regions with their descriptors, which become the caller's."""
        data, fds = receive_packet(self.sock)
        message = _decode_packet(data)
        assert isinstance(message, m.Regions), message
        return list(zip(message.regions, fds, strict=True))

    def write(self, frame: int, data: bytes) -> None:
        """Put bytes into a frame, even if it belongs to another writer by now."""
        self.map([frame])
        self.regions[frame >> m.REGION_SHIFT].view(frame & m.OFFSET_MASK, len(data))[:] = data

    def read(self, frame: int, length: int) -> bytes:
        """The bytes that are in a frame now."""
        self.map([frame])
        return bytes(self.regions[frame >> m.REGION_SHIFT].view(frame & m.OFFSET_MASK, length))

    # --- whole operations --------------------------------------------------------------------------

    def reserve(self, spec: NamespaceSpec, keys: bytes, *, first: int = 0, ttl_ms: int = 30_000) -> Any:
        """Reserve keys `first..` of a chain."""
        rest = keys[first * 16 :]
        parent = key_of(keys, first - 1) if first else b""
        return self.ask(m.Reserve, namespace=self.register(spec), parent=parent, keys=rest, ttl_ms=ttl_ms)

    def fill(self, spec: NamespaceSpec, keys: bytes, reserved: Any, first: int = 0) -> list[int]:
        """Write the right bytes into all frames of a reservation; the indices that have one."""
        indices = [index for index, state in enumerate(reserved.states) if state == m.BlockState.FRAME]
        for index, frame in zip(indices, m.unpack_frames(reserved.frames), strict=True):
            self.write(frame, content(key_of(keys, first + index), spec))
        return indices

    def commit(self, lease: int, indices: list[int]) -> list[int]:
        """Commit, and the states."""
        return list(self.ask(m.Commit, lease=lease, blocks=m.pack_indices(indices)).states)

    def store(self, spec: NamespaceSpec, keys: bytes, *, first: int = 0) -> list[int]:
        """Reserve, write and commit, and go on where fewer frames were given; the frames that were."""
        given: list[int] = []
        while True:
            reserved = self.reserve(spec, keys, first=first)
            indices = self.fill(spec, keys, reserved, first)
            if indices:
                self.commit(reserved.lease, indices)
            given += m.unpack_frames(reserved.frames)
            cut = reserved.states.find(m.BlockState.NONE)
            if cut < 0 or not indices:
                return given
            first += cut

    def match(self, spec: NamespaceSpec, keys: bytes, *, ttl_ms: int = 0, resolve: int = 0) -> Any:
        """The longest run."""
        return self.ask(m.Match, namespaces=[self.register(spec)], keys=keys, ttl_ms=ttl_ms, resolve=resolve)

    def length(self, spec: NamespaceSpec, keys: bytes) -> int:
        """Blocks of the longest run, without a lease."""
        return int(self.match(spec, keys).dram_blocks)

    def load(self, spec: NamespaceSpec, keys: bytes) -> int:
        """Match, read and verify all; how many blocks were good. Wrong bytes are an AssertionError."""
        matched = self.match(spec, keys, ttl_ms=30_000, resolve=m.MAX_RESOLVE)
        if not matched.lease:
            return 0
        frames = list(m.unpack_frames(matched.frames[0]))
        data = [self.read(frame, spec.block_bytes) for frame in frames]
        if not self.ask(m.Release, lease=matched.lease).good:
            return 0
        for number, got in enumerate(data):
            assert got == content(key_of(keys, number), spec), f"block {number} of {len(data)} is wrong"
        return len(data)

    # --- ends ------------------------------------------------------------------------------------

    def is_over(self, timeout_s: float = DEADLINE_S) -> bool:
        """Whether the daemon closes the session within the time; takes what comes before."""
        deadline_s = time.monotonic() + timeout_s
        while readable(self.sock, deadline_s - time.monotonic()):
            try:
                data, fds = receive_packet(self.sock)
            except ConnectionError:
                return True
            close_fds(fds)
            if not data:
                return True
        return False

    def hang_up(self) -> None:
        """Close the sockets, and keep the memory."""
        self.sock.close()
        self.dealer.close(0)
        self.context.destroy(0)

    def close(self) -> None:
        """Close the sockets and unmap."""
        self.hang_up()
        for region in self.regions.values():
            region.unmap()
        self.regions = {}

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
