"""A daemon that can be made to misbehave: real sockets, a real memfd, its own thread.

It keeps blocks of one namespace in one region and grants every lease. What it does with a request
is decided by `rules`: by default it answers; a rule may drop the request, hold the reply back, or
send something else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from tiercache.copies.arena import Region, create_region
from tiercache.protocol import messages as m
from tiercache.protocol.wire import close_fds, receive_packet, send_packet

Rule = Callable[[m.AnyRequest, m.Reply], "list[bytes] | None"]
"""Given a request and its proper reply: the parts to send instead; None sends the proper reply, [] nothing."""

_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(m.ANY_REQUEST)
_hello = msgspec.msgpack.Decoder(m.Hello)


class FakeDaemon:
    """Serves one run directory until `close`."""

    def __init__(self, run_dir: Path, *, region_bytes: int = 4 << 20, frame_bytes: int = 4096) -> None:
        run_dir.mkdir(exist_ok=True)
        self.address = str(run_dir)
        self.generation = secrets.randbits(60) | 1
        self.frame_bytes = frame_bytes
        self.rules: dict[type[m.AnyRequest], Rule] = {}
        self.requests: list[m.AnyRequest] = []
        self._answering = threading.Lock()
        self.hellos: list[m.Hello] = []
        self.held: list[tuple[bytes, bytes]] = []
        self.stored: dict[bytes, int] = {}
        self.good = True
        self.announce_regions = True
        self.kv_events = False
        self.refusal: m.Refused | None = None
        self.next_frame = 0
        self._region_bytes = region_bytes
        self._region_fd = create_region(region_bytes, "fake")
        self.region = Region(0, self._region_fd, region_bytes)
        self._writing: dict[int, list[bytes]] = {}
        self._tokens: dict[bytes, socket.socket] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self.control = f"ipc://{run_dir / 'control.sock'}"
        with contextlib.suppress(FileNotFoundError):
            (run_dir / "session.sock").unlink()
        self._router.bind(self.control)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(run_dir / "session.sock"))
        self._listener.listen()
        self._commands: list[Callable[[], None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="fake-daemon")
        self._thread.start()

    def seen(self, kind: type[m.AnyRequest]) -> list[m.AnyRequest]:
        """Requests of one kind so far."""
        with self._answering:
            return [request for request in self.requests if type(request) is kind]

    def hold_back(self, kind: type[m.AnyRequest]) -> None:
        """Hold back the replies to this kind of request until `let_go`."""
        self.rules[kind] = lambda request, reply: self._hold(request, reply)

    def let_go(self) -> None:
        """Send what was held back, and hold nothing back any more."""
        self.rules.clear()
        self._commands.append(self._send_held)

    def send(self, reply: m.Reply) -> None:
        """Send a reply to the client whose request is being answered. For rules."""
        self._router.send_multipart([self._identity, _encode(reply)])

    def drop_sessions(self) -> None:
        """Close all session sockets, as a daemon that dies does."""
        self._commands.append(self._drop_sessions)

    def send_regions(self) -> None:
        """Send the region to all clients now."""
        self._commands.append(lambda: [self._send_region(sock) for sock in self._tokens.values()] and None)

    def close(self) -> None:
        """End the daemon and its thread."""
        self._closing = True
        self._thread.join(60)
        for sock in self._tokens.values():
            sock.close()
        self._listener.close()
        self._router.close(0)
        self._context.term()
        self.region.unmap()
        os.close(self._region_fd)

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._listener.fileno(), zmq.POLLIN)
        while not self._closing:
            while self._commands:
                self._commands.pop(0)()
            ready = dict(poller.poll(5))
            if self._listener.fileno() in ready:
                self._accept()
            if self._router in ready:
                identity, *parts = self._router.recv_multipart()
                self._answer(identity, parts)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        try:
            data, fds = receive_packet(sock)
        except OSError:
            sock.close()
            return
        close_fds(fds)
        assert len(fds) == 1
        hello = _hello.decode(data)
        self.hellos.append(hello)
        if self.refusal is not None:
            send_packet(sock, _encode(self.refusal))
            sock.close()
            return
        token = secrets.token_bytes(16)
        welcome = m.Welcome(1, self.generation, token, self.control, "fake", self._region_bytes, self.kv_events, 16)
        try:
            send_packet(sock, _encode(welcome))
            if hello.map_arena and self.announce_regions:
                self._send_region(sock)
        except OSError:  # its client stopped waiting and has gone
            sock.close()
            return
        self._tokens[token] = sock

    def _send_region(self, sock: socket.socket) -> None:
        send_packet(sock, _encode(m.Regions([(0, self._region_bytes)])), [self._region_fd])

    def _drop_sessions(self) -> None:
        for sock in self._tokens.values():
            sock.close()
        self._tokens.clear()

    def _send_held(self) -> None:
        for identity, data in self.held:
            self._router.send_multipart([identity, data])
        self.held.clear()

    def _hold(self, request: m.AnyRequest, reply: m.Reply) -> list[bytes]:
        self.held.append((self._identity, _encode(reply)))
        return []

    def _answer(self, identity: bytes, parts: list[bytes]) -> None:
        request = _requests.decode(parts[0])
        self._identity = identity
        ids = (request.request_id, self.generation)
        if request.generation != self.generation:
            reply: m.Reply = m.Error(*ids, m.ErrorCode.STALE_GENERATION.value, "another life")
        elif request.session not in self._tokens:
            reply = m.Error(*ids, m.ErrorCode.UNKNOWN_SESSION.value, "who?")
        else:
            reply = self._proper(request)
        sent = None
        if (rule := self.rules.get(type(request))) is not None:
            sent = rule(request, reply)
        with self._answering:  # a client that has the answer finds the request in `seen`
            for part in [[_encode(reply)]] if sent is None else [sent]:
                if part:
                    self._router.send_multipart([identity, *part])
            # Appended last: a test that waits for it knows that the answer is on its way.
            self.requests.append(request)

    def _proper(self, request: m.AnyRequest) -> m.Reply:
        ids = (request.request_id, self.generation)
        match request:
            case m.RegisterNamespace():
                return m.Namespace(*ids, 1, self.frame_bytes)
            case m.Match():
                keys = _split(request.keys)
                blocks = next((n for n, key in enumerate(keys) if key not in self.stored), len(keys))
                frames = m.pack_frames([self.stored[key] for key in keys[: min(blocks, request.resolve)]])
                lease = secrets.randbits(40) | 1 if blocks and request.ttl_ms else m.NO_LEASE
                return m.Matched(*ids, blocks, 0, lease, [frames] if request.resolve else [])
            case m.Reserve():
                keys = _split(request.keys)
                lease = secrets.randbits(40) | 1
                self._writing[lease] = keys
                frames = []
                for key in keys:
                    frames.append(self.stored.setdefault(key, self.next_frame))
                    self.next_frame += self.frame_bytes
                return m.Reserved(*ids, lease, bytes([m.BlockState.FRAME] * len(keys)), m.pack_frames(frames))
            case m.Commit():
                return m.Committed(*ids, bytes(len(request.blocks) // 4))
            case m.Release():
                return m.Released(*ids, self.good)
            case m.Renew():
                return m.Renewed(*ids, bytes([1] * len(request.leases)))
            case m.Stats():
                return m.StatsReply(*ids, {"fake": 1})
            case _:
                return m.Done(*ids)


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]
