"""The sockets of KV events: a PUB, which binds or connects, and a ROUTER that resends what a subscriber has missed.

    PUB      ─► topic, sequence number (8 bytes, big endian), batch
    ROUTER   ◄─ empty, first sequence number wanted
             ─► empty, topic, sequence number, batch      as many as are still kept, in order
             ─► empty, empty, -1, empty                   the end

That is the protocol of vLLM's own publisher. A subscriber that does not keep up loses batches, and notices by the
numbers. So does one that was connected to an earlier life of the daemon: the numbers of a life begin with the time of
its start in microseconds. The first batches of a life wait for subscribers to come back, and empty batches break a
silence: their numbers tell who comes later what was missed. An answer that cannot begin with the batch that was asked
for begins with `AllBlocksCleared`: who has missed batches may know of blocks that are gone.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import deque
from itertools import islice
from pathlib import Path

import msgspec
import zmq

from tiercache.daemon.ground.connections import Connections
from tiercache.daemon.ground.multipart import Multipart
from tiercache.errors import ConfigError
from tiercache.ground.listening import is_ipv6, remedy, wants_ipv6

MAX_UNSENT = 2048
"""Batches that may wait for one subscriber; it loses further ones."""
MAX_SUBSCRIBERS = 256
"""Connections to each of the two sockets."""
MAX_BUFFER_BYTES = 64 << 20
MAX_REPLAYS = 64
"""Subscribers served at once; others wait."""
REPLAY_AT_ONCE = 128
"""Batches resent in one tick."""
REPLAY_TIMEOUT_S = 10.0
"""A subscriber that takes nothing for this time is given up."""
LINGER_MS = 100
RECONNECT_S = 1.0
"""The first batches wait for this time: subscribers of an earlier life come back, since ZeroMQ tries every 0.1 s."""
FIRST_SILENCE_S, LONGEST_SILENCE_S = 2.0, 300.0
"""An empty batch follows a silence, or another `AllBlocksCleared` while nothing has been stored; the next silence is
twice as long, until something happens."""
_END = (-1).to_bytes(8, "big", signed=True)
_REQUEST_PARTS, _MAX_REQUEST_BYTES = 3, 1024


class _Replay:
    """What is being resent to one subscriber."""

    def __init__(self, identity: bytes, following: int) -> None:
        self.identity = identity
        self.following = following
        self.moved_s = time.monotonic()


class Publisher:
    """Event loop only; never blocks.

    Args:
        endpoint: of the PUB.
        replay: endpoint of the ROUTER, or empty for none.
        topic: what every batch carries.
        buffer_steps: batches kept for resending, within MAX_BUFFER_BYTES.
        connects: a subscriber listens at `endpoint`.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str,
        topic: str,
        buffer_steps: int,
        max_unsent: int = MAX_UNSENT,
        connects: bool = False,
    ) -> None:
        self.batches = 0
        self.first = time.time_ns() // 1000
        self.replays = 0
        self.has_stored = False
        """True if a batch of this life tells of blocks that are there."""
        self.buffer_bytes = 0
        self._endpoint = endpoint
        self._replay_endpoint = replay
        self._topic = topic.encode()
        self._buffer_steps = buffer_steps
        self._max_unsent = max_unsent
        self._connects = connects
        self._buffer: deque[bytes] = deque()
        self._replays: deque[_Replay] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._requests: Multipart | None = None
        self._connections: list[Connections] = []
        self._sent = 0  # batches given to the PUB, or lost before
        self._held_until_s = time.monotonic() + RECONNECT_S
        self._silence_s = FIRST_SILENCE_S
        self._speak_at_s = self._held_until_s + FIRST_SILENCE_S
        self._empty = 0  # batches that are kept and say nothing: they push no other out

    def open(self) -> None:
        """Bind, or connect. Raises ConfigError for an unavailable address."""
        self._pub = self._open(zmq.PUB, "kv_events", self._endpoint, self._connects)
        if self._replay_endpoint:
            self._router = self._open(zmq.ROUTER, "kv_events_replay", self._replay_endpoint)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._requests = Multipart(self._router, _REQUEST_PARTS)

    def _open(self, kind: int, setting: str, endpoint: str, connects: bool = False) -> zmq.Socket[bytes]:
        socket_ = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, self._max_unsent),
            (zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES),
            (zmq.IPV6, int(wants_ipv6(endpoint) if connects else is_ipv6(endpoint))),
        ):
            socket_.setsockopt(option, value)
        connections = Connections(socket_, MAX_SUBSCRIBERS)
        scheme, _, path = endpoint.partition("://")
        try:
            if connects:
                socket_.connect(endpoint)
            else:
                if scheme == "ipc":
                    _check_free(path)
                socket_.bind(endpoint)
                if scheme == "ipc":
                    Path(path).chmod(0o600)
        except (OSError, zmq.ZMQError) as error:
            connections.close()
            socket_.close()
            reason = zmq.strerror(error.errno or 0)
            raise ConfigError(f"{setting} = {endpoint}: {reason}: {remedy(endpoint)}") from error
        self._connections.append(connections)
        return socket_

    def publish(self, batch: bytes) -> None:
        """Send a batch to all present subscribers, and keep it for those who ask later."""
        self._silence_s = FIRST_SILENCE_S
        self._publish(batch)

    def _publish(self, batch: bytes) -> None:
        self.batches += 1
        self._buffer.append(batch)
        self.buffer_bytes += len(batch)
        self._empty += len(batch) == _EMPTY_BYTES
        while len(self._buffer) - self._empty > self._buffer_steps or self.buffer_bytes > MAX_BUFFER_BYTES:
            gone = len(self._buffer.popleft())
            self.buffer_bytes -= gone
            self._empty -= gone == _EMPTY_BYTES
        self._speak_at_s = max(time.monotonic(), self._held_until_s) + self._silence_s
        if time.monotonic() >= self._held_until_s:
            self._send_new()

    def _send_new(self) -> None:
        """Give the PUB what it has not had. What is no longer kept is lost, as for a slow subscriber."""
        kept = self.batches - len(self._buffer)
        self._sent = max(self._sent, kept)
        if self._pub is not None:
            unsent = list(islice(reversed(self._buffer), self.batches - self._sent))  # from the end, which is near
            for batch in reversed(unsent):
                self._pub.send_multipart((self._topic, self._number(self._sent), batch), zmq.NOBLOCK)
                self._sent += 1
        self._sent = self.batches

    def _number(self, place: int) -> bytes:
        return (self.first + place).to_bytes(8, "big")

    def _break_silence(self) -> None:
        """Have those who subscribe hear of this life, even if nothing happens in it."""
        now_s = time.monotonic()
        if now_s >= self._held_until_s and self._sent < self.batches:
            self._send_new()
        if now_s >= self._speak_at_s:
            self._silence_s = min(2 * self._silence_s, LONGEST_SILENCE_S)
            # Until something is stored, whoever comes late is told what the first batch has said.
            self._publish(_batch() if self.has_stored else _batch(_CLEARED))

    def tick(self) -> None:
        """Count subscribers that came and went, and resend a part of what they have asked for."""
        for connections in self._connections:
            connections.look()
        if self._pub is not None:
            self._break_silence()
        if self._router is None or self._requests is None:
            return
        while len(self._replays) < MAX_REPLAYS:
            try:
                parts = [part.bytes for part in self._requests.receive()]
            except zmq.Again:
                break
            if len(parts) == _REQUEST_PARTS:  # else the answer could not be matched to a request
                self.replays += 1
                self._replays.append(_Replay(parts[0], int.from_bytes(parts[2], "big")))
            elif not parts:
                break  # what was too long is skipped a slice in each tick
        budget = REPLAY_AT_ONCE
        for _ in range(len(self._replays)):
            replay = self._replays.popleft()
            sent, more = self._send_again(self._router, replay, budget)
            budget -= sent
            if more:
                self._replays.append(replay)

    def _send_again(self, router: zmq.Socket[bytes], replay: _Replay, budget: int) -> tuple[int, bool]:
        """Send at most `budget` batches; returns how many, and whether there is more to send."""
        end = self.first + self.batches
        oldest = end - len(self._buffer)
        missed = replay.following > end or self.first < oldest > replay.following
        if missed:
            replay.following = 0  # of another life, perhaps, by a clock that was set back
        first = max(replay.following, oldest)
        address = replay.identity, b""
        try:
            if missed:
                cleared = _batch(_CLEARED)
                router.send_multipart((*address, self._topic, (oldest - 1).to_bytes(8, "big"), cleared), zmq.NOBLOCK)
            replay.following = first
            for batch in islice(self._buffer, first - oldest, first - oldest + budget):
                number = replay.following.to_bytes(8, "big")
                router.send_multipart((*address, self._topic, number, batch), zmq.NOBLOCK)
                replay.following += 1
            over = replay.following >= end
            if over:
                router.send_multipart((*address, b"", _END, b""), zmq.NOBLOCK)
        except zmq.Again:  # it reads more slowly than this
            over = time.monotonic() > replay.moved_s + REPLAY_TIMEOUT_S
        except zmq.ZMQError:  # it has gone
            over = True
        if replay.following > first:
            replay.moved_s = time.monotonic()
        return replay.following - first, not over

    def refused_connections(self) -> int:
        """Refused connections of subscribers beyond `MAX_SUBSCRIBERS`."""
        return sum(connections.refused for connections in self._connections)

    def stats(self) -> dict[str, int]:
        """What `stats` shows of this."""
        return {"batches": self.batches, "buffer_bytes": self.buffer_bytes, "replays": self.replays}

    def close(self) -> None:
        """Close; messages on their way to subscribers get a tenth of a second."""
        self._send_new()
        for connections in self._connections:
            connections.close()
        for socket_ in (self._pub, self._router):
            if socket_ is not None:
                socket_.close()
        self._context.term()


def _check_free(path: str) -> None:
    """Raise OSError if binding would take a path from a socket in use, or remove a file that is not a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if not Path(path).is_socket():
                raise FileExistsError(errno.EEXIST, path) from None
            return
    raise OSError(errno.EADDRINUSE, path)


def _batch(*events: dict[str, str]) -> bytes:
    return msgspec.msgpack.encode([time.time(), events, None])


_CLEARED = {"type": "AllBlocksCleared"}
_EMPTY_BYTES = len(_batch())
