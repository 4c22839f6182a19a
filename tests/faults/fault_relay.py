"""Between clients and a real daemon: a relay that can be late, lose replies and send them twice.

It passes on the session socket with its descriptors, and the messages of the control socket. The
daemon sees the relay's process as its client, and the client sees an address that answers as told.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq
from waiting import wait_until

from tiercache.config.daemon_config import control_endpoint, session_socket_path
from tiercache.protocol import messages as m
from tiercache.protocol.wire import close_fds, receive_packet, send_packet

Delays = Callable[[m.AnyRequest], list[float]]
Mangle = Callable[[m.AnyRequest, list[bytes]], list[bytes]]
_decode_packet = msgspec.msgpack.Decoder(m.SessionMessage).decode
_decode_request = msgspec.msgpack.Decoder(m.AnyRequest).decode
_decode_reply = msgspec.msgpack.Decoder(m.AnyReply).decode


HELD = math.inf
"""Of a reply that is sent when the test lets it go."""


def at_once(request: m.AnyRequest) -> list[float]:
    """The manners of a good daemon: one reply, now."""
    return [0.0]


class Relay:
    """Stands on a run directory of its own before the daemon on `run_dir`.

    `delays` says for each request when its reply is sent, in seconds after it came from the
    daemon: an empty list loses it, two entries send it twice, `HELD` keeps it until `let_go()`. `mangle`
    may change the reply's parts, and `replace_fds` the descriptors of regions. All may be changed at any time.
    """

    def __init__(self, run_dir: str) -> None:
        self.delays: Delays = at_once
        self.mangle: Mangle = lambda request, parts: parts
        self.replace_fds: Callable[[list[int]], list[int]] = lambda fds: fds
        self.run_dir = tempfile.mkdtemp(prefix="tcf-", dir="/tmp")
        self._daemon = run_dir
        self._stopping = False
        self._letting_go = False
        self._thread = threading.Thread(target=self._run, name="relay")
        self._ready = threading.Event()
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.set(zmq.LINGER, 0)
        self._front.bind(control_endpoint(Path(self.run_dir)))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(session_socket_path(self.run_dir)))
        self._listener.listen(64)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}  # the daemon's side of each client's DEALER
        self._asked: dict[tuple[bytes, int], m.AnyRequest] = {}
        self._due: list[tuple[float, int, list[bytes]]] = []
        self._order = itertools.count()
        self._pairs: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._poller = zmq.Poller()
        for source in (self._front, self._listener):
            self._poller.register(source, zmq.POLLIN)
        self._ready.set()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        for back in self._backs.values():
            back.close(0)
        for ours, theirs in self._pairs.values():
            ours.close()
            theirs.close()
        self._listener.close()
        self._front.close(0)
        self._context.destroy(0)

    def _turn(self) -> None:
        wait_s = min(0.02, max(0.0, self._due[0][0] - time.monotonic())) if self._due else 0.02
        for source, _ in self._poller.poll(wait_s * 1000):
            if source is self._front:
                self._pass_request()
            elif source == self._listener.fileno():
                self._accept()
            elif isinstance(source, int):
                self._pass_packet(source)
            else:
                self._take_reply(source)
        letting_go, self._letting_go = self._letting_go, False
        while self._due and (letting_go or self._due[0][0] <= time.monotonic()):
            self._front.send_multipart(heapq.heappop(self._due)[2])

    def _accept(self) -> None:
        ours, _ = self._listener.accept()
        theirs = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            theirs.connect(str(session_socket_path(self._daemon)))
            self._greet(ours, theirs)
        except OSError:  # one of them has gone meanwhile: a client waits for so long and no longer
            ours.close()
            theirs.close()
            return
        for sock in (ours, theirs):
            self._pairs[sock.fileno()] = (ours, theirs)
            self._poller.register(sock, zmq.POLLIN)

    def _greet(self, ours: socket.socket, theirs: socket.socket) -> None:
        data, fds = receive_packet(ours)
        close_fds(fds)
        if not data:
            raise ConnectionAbortedError
        pidfd = os.pidfd_open(os.getpid())
        try:
            send_packet(theirs, data, [pidfd])
        finally:
            os.close(pidfd)
        data, fds = receive_packet(theirs)
        if not data:
            raise ConnectionAbortedError
        welcome = _decode_packet(data)
        assert isinstance(welcome, m.Welcome)
        welcome.control = control_endpoint(Path(self.run_dir))
        send_packet(ours, msgspec.msgpack.encode(welcome))

    def _pass_packet(self, fd: int) -> None:
        if fd not in self._pairs:
            return  # its other end has ended it in this very turn
        ours, theirs = self._pairs[fd]
        source, target = (ours, theirs) if fd == ours.fileno() else (theirs, ours)
        with suppress(OSError):  # one of them may go at any time
            data, fds = receive_packet(source)
            if data:
                sent = self.replace_fds(fds) if source is theirs and fds else fds
                try:
                    send_packet(target, data, sent)
                finally:
                    close_fds(list({*fds, *sent}))
                return
        for sock in (ours, theirs):
            self._poller.unregister(sock)
            del self._pairs[sock.fileno()]
            sock.close()

    def _pass_request(self) -> None:
        client, *parts = self._front.recv_multipart()
        back = self._backs.get(client)
        if back is None:
            back = self._backs[client] = self._context.socket(zmq.DEALER)
            back.set(zmq.LINGER, 0)
            back.connect(control_endpoint(Path(self._daemon)))
            self._poller.register(back, zmq.POLLIN)
        request = _decode_request(parts[0])
        self._asked[client, request.request_id] = request
        back.send_multipart(parts)

    def _take_reply(self, back: zmq.Socket[bytes]) -> None:
        parts = back.recv_multipart()
        client = next(name for name, other in self._backs.items() if other is back)
        request = self._asked.pop((client, _decode_reply(parts[0]).request_id))
        parts = self.mangle(request, parts)
        for delay_s in self.delays(request):
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), [client, *parts]))

    def let_go(self) -> None:
        """Send every reply that is kept, now; wait for the first one, which the daemon may still owe."""
        wait_until(lambda: any(due_s == HELD for due_s, *_ in list(self._due)), "a reply is kept")
        self._letting_go = True

    def close(self) -> None:
        """End it."""
        self._stopping = True
        self._thread.join(10)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
