"""A client of the wire that does what a client may do, and also what it must not.

It keeps frames that it gave back, writes late, and sends requests that are no longer asked for.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq
from chains import key_of
from fault_engine import content
from raw_client import Client

from tiercache.protocol import messages as m
from tiercache.protocol.namespaces import NamespaceSpec

DEADLINE_S = 40.0
_decode_reply = msgspec.msgpack.Decoder(m.ANY_REPLY).decode


class Peer(Client):
    """One session with a daemon, by the product's own messages. Replies to other requests wait in `answers`."""

    def __init__(self, run_dir: str, *, name: str = "peer", map_arena: bool = True) -> None:
        super().__init__(run_dir, name=name, map_arena=map_arena)
        self.answers: dict[int, m.Reply] = {}

    def __enter__(self) -> Peer:
        return self

    def post(
        self, kind: type[m.AnyRequest], *, deadline_s: float = DEADLINE_S, generation: int | None = None, **fields: Any
    ) -> int:
        """Send a request and do not wait; its id."""
        changed = {} if generation is None else {"generation": generation}
        request = kind(*self.header(deadline_s, **changed), **fields)
        self._dealer.send(msgspec.msgpack.encode(request), zmq.NOBLOCK)
        return request.request_id

    def answer_to(self, request_id: int, timeout_s: float = DEADLINE_S) -> Any:
        """The reply to one request, an `Error` included."""
        while request_id not in self.answers:
            assert self._dealer.poll(1000 * timeout_s), "no reply"
            reply = _decode_reply(self._dealer.recv())
            self.answers[reply.request_id] = reply
        return self.answers.pop(request_id)

    def tell(self, kind: type[m.AnyRequest], *, timeout_s: float = DEADLINE_S, **fields: Any) -> Any:
        """One request and its reply, an `Error` included."""
        return self.answer_to(self.post(kind, **fields), timeout_s)

    def register(self, spec: NamespaceSpec) -> int:
        return int(self.tell(m.RegisterNamespace, spec=spec).namespace)

    def write(self, frame: int, data: bytes) -> None:
        """Put bytes into a frame, even if it belongs to another writer by now."""
        with self.frame(frame, len(data)) as view:
            view[:] = data

    def reserve_chain(self, spec: NamespaceSpec, keys: bytes, *, first: int = 0, ttl_ms: int = 30_000) -> Any:
        """Reserve keys `first..` of a chain."""
        parent = key_of(keys, first - 1) if first else b""
        return self.tell(
            m.Reserve, namespace=self.register(spec), parent=parent, keys=keys[first * 16 :], ttl_ms=ttl_ms
        )

    def store_chain(self, spec: NamespaceSpec, keys: bytes) -> list[int]:
        """Reserve, write and commit, and go on where fewer frames were given; the frames that were."""
        given, first = list[int](), 0
        while True:
            reserved = self.reserve_chain(spec, keys, first=first)
            indices = [index for index, state in enumerate(reserved.states) if state == m.BlockState.FRAME]
            frames = list(m.unpack_frames(reserved.frames))
            for index, frame in zip(indices, frames, strict=True):
                self.write(frame, content(key_of(keys, first + index), spec))
            if indices:
                self.commit(reserved.lease, indices)
            given += frames
            cut = reserved.states.find(m.BlockState.NONE)
            if cut < 0 or not indices:
                return given
            first += cut

    def match_chain(self, spec: NamespaceSpec, keys: bytes, *, ttl_ms: int = 0) -> Any:
        return self.tell(m.Match, namespaces=[self.register(spec)], keys=keys, ttl_ms=ttl_ms)

    def load_chain(self, spec: NamespaceSpec, keys: bytes) -> int:
        """Match, read and verify all; how many blocks were good. Wrong bytes are an AssertionError."""
        data = self.load(self.register(spec), keys, spec.block_bytes)
        for number, got in enumerate(data):
            assert got == content(key_of(keys, number), spec), f"block {number} of {len(data)} is wrong"
        return len(data)

    def hang_up(self) -> None:
        """Close the sockets, and keep the memory."""
        self.session.close()
        self._dealer.close(0)
