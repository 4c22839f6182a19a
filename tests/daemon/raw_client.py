"""A client of the daemon written from `daemon/PROTOCOL.md` alone: no module of tiercache is imported here.

What it needs is what any language has: unix sockets, msgpack, ZeroMQ, blake2b, mmap.
"""

from __future__ import annotations

import array
import hashlib
import itertools
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq
from waiting import wait_until

WAIT_S = 60.0
HAVE, PENDING, FRAME, NONE = 0, 1, 2, 3
VISIBLE, HELD, DROPPED = 0, 1, 2
ROOT = Path(__file__).resolve().parents[2]
REGIONS = 40
"""Of the daemon in conftest.py."""
_numbers = itertools.count()


class Daemon:
    """A daemon process in its own run dir."""

    def __init__(self, run_dir: Path, *flags: str) -> None:
        self.run_dir = run_dir
        command = [sys.executable, "-m", "tiercache.daemon", "--run-dir", str(run_dir), *flags]
        self.process = subprocess.Popen([*command, "--log-level", "error"], cwd=ROOT)

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextmanager
def daemon(run_dir: Path, *flags: str) -> Iterator[Daemon]:
    """A daemon that must end cleanly when it is told to."""
    running = Daemon(run_dir, *flags)
    try:
        yield running
    finally:
        status = running.stop()
    assert status == 0


class SessionSocket:
    """The SEQPACKET socket and its packets."""

    def __init__(self, run_dir: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        path = str(run_dir / "session.sock")

        def connected() -> bool:
            try:
                self.sock.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                return False
            return True

        wait_until(connected)
        self.sock.settimeout(WAIT_S)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        packet = message if isinstance(message, bytes) else msgpack.packb(message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([packet], rights)

    def receive(self) -> tuple[Any, list[int]]:
        """One packet; None at the end of file."""
        packet, ancillary, flags, _ = self.sock.recvmsg(65536, socket.CMSG_SPACE(16 * 4), socket.MSG_CMSG_CLOEXEC)
        assert not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
        fds = array.array("i")
        for level, kind, content in ancillary:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            fds.frombytes(content)
        return (msgpack.unpackb(packet) if packet else None), list(fds)

    def hello(self, message: Any, fds: Sequence[int] | None = None) -> tuple[Any, list[int]]:
        """Say hello with the pidfd of this process, or with `fds`; returns the answer."""
        pidfd = os.pidfd_open(os.getpid())
        try:
            self.send(message, [pidfd] if fds is None else fds)
        finally:
            os.close(pidfd)
        return self.receive()

    def ended(self) -> bool:
        """Whether the other side has closed."""
        try:
            return self.receive()[0] is None
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.sock.close()


def now_us() -> int:
    return time.monotonic_ns() // 1000


def hello(instance: bytes, name: str = "raw", map_arena: bool = True) -> list[Any]:
    return ["hello", 1, 1, instance, name, now_us(), map_arena]


class Requests:
    """Requests of one session over one DEALER, whatever this is connected by."""

    token: bytes
    generation: int

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 100_000), (zmq.RCVHWM, 100_000)):
            self._dealer.setsockopt(option, value)
        self._ids = itertools.count(1)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._dealer.close()
        self._context.term()

    def header(self, deadline_s: float = WAIT_S, **changed: Any) -> list[Any]:
        """The fields that every request starts with, after its tag."""
        fields = {
            "request_id": next(self._ids),
            "session": self.token,
            "generation": self.generation,
            "deadline_us": now_us() + int(deadline_s * 1e6),
        }
        assert changed.keys() <= fields.keys()
        return list({**fields, **changed}.values())

    def exchange(self, *parts: bytes) -> tuple[Any, list[bytes]]:
        """Send parts, receive a decoded reply and its payload parts."""
        self._dealer.send_multipart(parts)
        assert self._dealer.poll(int(WAIT_S * 1000)), "no answer"
        answer = self._dealer.recv_multipart()
        return msgpack.unpackb(answer[0], strict_map_key=False), answer[1:]

    def send(self, tag: str, *fields: Any) -> None:
        """Send one request and do not read its answer."""
        self._dealer.send(msgpack.packb([tag, *self.header(), *fields]), zmq.NOBLOCK)

    def answer(self) -> list[Any]:
        """The next answer, with all its parts."""
        assert self._dealer.poll(int(WAIT_S * 1000)), "no answer"
        return list(msgpack.unpackb(self._dealer.recv(), strict_map_key=False))

    def leave(self) -> None:
        """Say goodbye, whatever else is answered before that."""
        self.send("bye")
        while self.answer()[0] != "done":
            pass

    def ask(self, tag: str, *fields: Any, payload: Sequence[bytes] = (), **changed: Any) -> list[Any]:
        """One request; the reply without its request id and generation, which are checked."""
        header = self.header(**changed)
        reply, rest = self.exchange(msgpack.packb([tag, *header, *fields]), *payload)
        assert reply[1] == header[0]
        assert reply[2] == self.generation
        return [reply[0], *reply[3:], *rest]

    def refusal(self, tag: str, *fields: Any, payload: Sequence[bytes] = (), **changed: Any) -> str:
        """The error code that a request is answered with."""
        answer = self.ask(tag, *fields, payload=payload, **changed)
        assert answer[0] == "error", answer
        assert answer[2], "an error says what to do"
        return str(answer[1])

    def namespace(self, block_bytes: int = 8192, **changed: Any) -> int:
        """A namespace that no other test has."""
        tag, number, frame_bytes = self.ask("register_namespace", new_spec(block_bytes, **changed))
        assert (tag, frame_bytes) == ("namespace", -(-block_bytes // 4096) * 4096)
        return int(number)

    def stats(self) -> dict[str, Any]:
        tag, stats = self.ask("stats")
        assert tag == "stats_reply"
        return dict(stats)

    def reserve(self, namespace: int, keys: bytes, parent: bytes = b"", ttl_ms: int = 10_000) -> tuple[Any, ...]:
        """Lease, states, frames, parent missing."""
        tag, lease, states, frames, parent_missing = self.ask("reserve", namespace, parent, keys, ttl_ms)
        assert tag == "reserved"
        return lease, list(states), list(struct.unpack(f"<{len(frames) // 8}Q", frames)), parent_missing

    def commit(self, lease: int, indices: Sequence[int]) -> list[int]:
        tag, states = self.ask("commit", lease, struct.pack(f"<{len(indices)}I", *indices))
        assert tag == "committed"
        return list(states)

    def match(self, namespaces: list[int], keys: bytes, ttl_ms: int = 10_000, resolve: int = 0) -> tuple[Any, ...]:
        """Blocks in DRAM, lease, frames per namespace."""
        tag, dram, below, lease, frames, *_ = self.ask("match", namespaces, keys, ttl_ms, resolve)
        assert (tag, below) == ("matched", 0)
        return dram, lease, [list(struct.unpack(f"<{len(packed) // 8}Q", packed)) for packed in frames]

    def length(self, namespace: int, keys: bytes) -> int:
        return int(self.match([namespace], keys, ttl_ms=0)[0])

    def release(self, lease: int) -> bool:
        tag, good = self.ask("release", lease)
        assert tag == "released"
        return bool(good)


class Client(Requests):
    """One session: its packets, its mapped regions, one DEALER."""

    def __init__(
        self,
        run_dir: Path | str,
        instance: bytes = b"",
        name: str = "raw",
        map_arena: bool = True,
    ) -> None:
        super().__init__()
        self.instance = instance or os.urandom(16)
        self.session = SessionSocket(Path(run_dir))
        welcome, fds = self.session.hello(hello(self.instance, name, map_arena))
        assert fds == []
        tag, self.protocol, self.generation, self.token, self.control, self.version, self.arena_bytes, *more = welcome
        self.wants_events = bool(more and more[0])
        assert (tag, self.protocol, len(self.token)) == ("welcome", 1, 16)
        self.regions: dict[int, mmap.mmap] = {}
        self.region_packets: list[int] = []
        self._dealer.connect(self.control)

    def __enter__(self) -> Client:
        return self

    def close(self) -> None:
        self.session.close()
        super().close()
        for region in self.regions.values():
            region.close()

    # --- the arena -------------------------------------------------------------------------------

    def await_arena(self) -> None:
        """Wait until the daemon has all of its memory. It serves before that, but refuses blocks."""
        wait_until(lambda: self.stats()["arena"]["populated_bytes"] == self.arena_bytes)

    def take_regions(self, wait_s: float = WAIT_S) -> None:
        """Map what the next packet brings."""
        self.session.sock.settimeout(wait_s)
        message, fds = self.session.receive()
        assert message[0] == "regions"
        assert len(message[1]) == len(fds) > 0
        self.region_packets.append(len(fds))
        for (region_id, size_bytes), fd in zip(message[1], fds, strict=True):
            assert os.fstat(fd).st_size == size_bytes
            assert region_id not in self.regions
            self.regions[region_id] = mmap.mmap(fd, size_bytes)
            os.close(fd)

    def frame(self, number: int, length: int) -> memoryview:
        """The bytes of a frame in this process's mapping."""
        region_id, offset = number >> 48, number & (1 << 48) - 1
        assert offset % 4096 == 0
        while region_id not in self.regions:  # sent on the other socket before the frame was named on this one
            self.take_regions()
        return memoryview(self.regions[region_id])[offset : offset + length]

    def store(self, namespace: int, keys: bytes, blocks: Sequence[bytes], parent: bytes = b"") -> list[int]:
        """Reserve, copy through shared memory, commit; the commit states."""
        lease, states, frames, parent_missing = self.reserve(namespace, keys, parent)
        assert not parent_missing
        mine = [index for index, state in enumerate(states) if state == FRAME]
        for index, frame in zip(mine, frames, strict=True):
            with self.frame(frame, len(blocks[index])) as view:
                view[:] = blocks[index]
        return self.commit(lease, mine)

    def load(self, namespace: int, keys: bytes, block_bytes: int) -> list[bytes]:
        """Match, copy from shared memory, release; nothing unless the release says that it is good."""
        dram, lease, frames = self.match([namespace], keys, resolve=512)
        if not dram:
            return []
        blocks = []
        for frame in frames[0]:
            with self.frame(frame, block_bytes) as view:
                blocks.append(bytes(view))
        return blocks if self.release(lease) else []


def new_spec(block_bytes: int = 8192, **changed: Any) -> dict[str, Any]:
    """A spec that no other test has."""
    return {
        "engine": "raw/1",
        "layout": f"test {next(_numbers)} of {os.getpid()}",
        "dtype": "uint8",
        "block_size": 4,
        "block_bytes": block_bytes,
        **changed,
    }


def content_id(model: str, epoch: int = 0, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    fields = msgpack.packb([model, epoch, [list(pair) for pair in sorted(extra)]])
    return hashlib.blake2b(fields, digest_size=16, person=b"tiercache-model").digest()


def root_key(model: str, salt: bytes = b"", epoch: int = 0, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    fields = msgpack.packb([content_id(model, epoch, extra), salt])
    return hashlib.blake2b(fields, digest_size=16, person=b"tiercache-root").digest()


def next_key(last: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    content = last + struct.pack(f"<{len(tokens)}I", *tokens) + extra
    return hashlib.blake2b(content, digest_size=16).digest()


def new_chain(blocks: int) -> bytes:
    """Keys of a prompt that no other test has."""
    last, keys = root_key(f"model {next(_numbers)} of {os.getpid()}"), b""
    for number in range(blocks):
        last = next_key(last, [number, number + 1, number + 2, number + 3])
        keys += last
    return keys


def block_of(number: int, block_bytes: int = 8192) -> bytes:
    """Content that differs between blocks."""
    return hashlib.blake2b(struct.pack("<Q", number)).digest() * (block_bytes // 64)
