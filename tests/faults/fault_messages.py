"""Things that no client should send: packets for the session socket, parts for the ROUTER, raw ZMTP."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgpack
import msgspec
from fault_peer import DEADLINE_S, hello, open_session_socket, readable

from tiercache.protocol import messages as m
from tiercache.protocol.wire import close_fds, receive_packet, send_packet

_decode = msgspec.msgpack.Decoder(m.SessionMessage).decode
END = None
DEEP = b"\x91" * 6000 + b"\x90"
"""An array in an array in an array..."""


def greet(
    run_dir: str, data: bytes | None = None, fds: Sequence[int] | None = None, pid: int | None = None
) -> m.Welcome | m.Refused | m.Regions | None:
    """Send one first packet and return the answer; None is the end of the connection.

    By default a right hello, with the pidfd of `pid` (this process by default).
    """
    own = [] if fds is not None else [os.pidfd_open(pid or os.getpid())]
    with open_session_socket(run_dir) as sock:
        with suppress(BrokenPipeError):  # refused unread: the reason waits to be read
            send_packet(sock, hello(b"i" * 16) if data is None else data, own if fds is None else fds)
        close_fds(own)
        return answer_on(sock)


def answer_on(sock: socket.socket) -> m.Welcome | m.Refused | m.Regions | None:
    """The next packet of a session socket; None is the end of the connection."""
    try:
        data, fds = receive_packet(sock)
    except ConnectionResetError:
        data, fds = receive_packet(sock)  # refused unread: the reason comes after the error
    close_fds(fds)
    return _decode(data) if data else END


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def bad_headers(session: bytes, generation: int, bomb: Path) -> dict[str, bytes]:
    """Header parts that are no request, by what is wrong with them."""
    start = [session, generation, (1 << 62)]
    pack = msgpack.packb
    ping = pack(["ping", 7, *start])
    match = pack(["match", 7, *start, [1], b"k" * 16])
    prefix = b"\x98" + pack("match") + pack(7) + b"".join(pack(field) for field in start)
    unknown = b"\x93" + pack("nope") + pack(7)
    return {
        "nothing": b"",
        "one byte": b"\x00",
        "truncated": match[:-9],
        "cut after the tag": match[:7],
        "trailing bytes": ping + b"\x00",
        "no array": pack({"ping": 1}),
        "no tag": pack([7, *start]),
        "unknown tag": pack(["nope", 7, *start]),
        "a reply": pack(["done", 7, generation]),
        "number for a string": pack([1, 7, *start]),
        "text for a number": pack(["ping", "7", *start]),
        "too few fields": pack(["ping", 7]),
        "float for a lease": pack(["release", 7, *start, 1.5]),
        "none for a lease": pack(["release", 7, *start, None]),
        "text for keys": pack(["match", 7, *start, [1], "k" * 16]),
        "numbers that are too large": pack(["ping", (1 << 64) - 1, session, generation, (1 << 64) - 1])[:-8],
        "an array said to be huge": prefix + b"\xdd\xff\xff\xff\xff",
        "a map said to be huge": unknown + b"\xdf\xff\xff\xff\xff",
        "bytes said to be huge": prefix + b"\x91\x01\xc6\xff\xff\xff\xff",
        "deeper than the stack": b"\x96" + pack("ping") + pack(7) + b"".join(map(pack, start)) + DEEP,
        "unknown and deeper than the stack": unknown + DEEP,
        "a tag that is no text": b"\x92\xa4\xff\xff\xff\xff\x07",
        "unknown with bytes that are no text": unknown + b"\xa2\xff\xff",
        "a spec that is no text": pack(["register_namespace", 7, *start, {"engine": "EE", "layout": "l"}]).replace(
            b"EE", b"\xff\xfe"
        ),
        "counters that are no text": pack(["report", 7, *start, "none", {"EE": 1}]).replace(b"EE", b"\xff\xfe"),
        "a map that cannot be a key": unknown + b"\x81\x81\x01\x02\x03",
        "a time that never was": unknown + b"\xd7\xff" + b"\xff" * 8,
        "pickle": pickle.dumps(Bomb(bomb)),
        "pickle in an ext type": msgpack.packb(["ping", 7, *start, msgpack.ExtType(4, pickle.dumps(Bomb(bomb)))])[:-1],
        "json": b'["ping", 7, "", 0, 0]',
        "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "two mebibytes of nothing": bytes(2 << 20),
        "two million empty arrays": unknown + b"\xdd\x00\x1f\x00\x00" + b"\x90" * 0x1F0000,
    }


def random_headers(dice: random.Random, count: int, like: Sequence[bytes]) -> list[bytes]:
    """Half of them noise, half of them real requests with a few bytes changed, cut or doubled."""
    headers = []
    for _ in range(count):
        if dice.random() < 0.5:
            headers.append(dice.randbytes(dice.randint(0, 200)))
            continue
        header = bytearray(dice.choice(like))
        for _ in range(dice.randint(1, 6)):
            header[dice.randrange(len(header))] = dice.randrange(256)
        cut = dice.randint(0, len(header)) if dice.random() < 0.3 else len(header)
        headers.append(bytes(header[:cut]) * dice.randint(1, 2))
    return headers


class RawZmtp:
    """A ZMTP 3.0 peer without ZeroMQ: the NULL handshake, then any bytes (RFC 23/ZMTP)."""

    def __init__(self, endpoint: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(endpoint.removeprefix("ipc://"))

    def shake_hands(self) -> None:
        """Greeting and READY both ways."""
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(1 + 31)
        self.sock.sendall(greeting)
        self._take(64)
        properties = b"".join(
            bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
            for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b""))
        )
        body = b"\x05READY" + properties
        self.sock.sendall(b"\x04" + bytes([len(body)]) + body)
        flags, length = self._take(2)
        assert flags == 4, "the peer's READY"
        self._take(length)

    def _take(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            more = self.sock.recv(count - len(got))
            assert more, "the daemon hung up during the handshake"
            got += more
        return got

    def announce(self, length: int) -> None:
        """The head of a frame of `length` bytes, and nothing of the frame."""
        self.sock.sendall(b"\x02" + struct.pack(">Q", length))

    def is_over(self, timeout_s: float = DEADLINE_S) -> bool:
        """Whether the daemon hangs up within the time."""
        deadline_s = time.monotonic() + timeout_s
        while readable(self.sock, deadline_s - time.monotonic()):
            try:
                if not self.sock.recv(1 << 16):
                    return True
            except ConnectionError:
                return True
        return False

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self.sock.close()

    def __enter__(self) -> RawZmtp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
