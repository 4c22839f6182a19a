"""A daemon in memory, for tests of the connector without sockets, threads or time: each request is a call.

MemoryDaemon    one life of a daemon: blocks, frames, leases. `answer` answers a request as the protocol says.
MemorySession   what a connector asks of `tiercache.client.session.Session`
MemoryClient    what it asks of `tiercache.client.client.Client`

The daemon asserts what only it can see: every committed byte is right, no lease ends while a copy of its holder runs,
and each frame has one owner.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from tiercache.client.leases import Leases
from tiercache.client.self_report import SelfReport
from tiercache.copies.pool import Copier, CopyLost, Limit
from tiercache.errors import DaemonUnavailable, DeadlineExceeded, RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.namespaces import NamespaceSpec

BLOCK_BYTES = 64
GARBAGE = 0xEE


def content(key: bytes) -> bytes:
    """The right bytes of a block."""
    return hashlib.blake2b(key, digest_size=BLOCK_BYTES).digest()


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + m.KEY_BYTES] for at in range(0, len(keys), m.KEY_BYTES)]


class Trouble(Enum):
    """What becomes of one request."""

    UNHEARD = auto()  # it is lost
    UNANSWERED = auto()  # it is done, and the reply is lost
    CUT_OFF = auto()  # the session ends before it
    REFUSED = auto()


@dataclass
class Read:
    """A read lease: the frames of its blocks; `good` until one of them is dropped."""

    frames: list[int]
    holders: list[MemorySession]
    ends_s: float
    resolvable: int
    good: bool = True


@dataclass
class Pending:
    """A reserved block that is not visible yet; `complete` while it waits for the block before it."""

    frame: int
    parent: bytes
    lease: int
    complete: bool = False


@dataclass
class Write:
    """A write lease and its blocks, by index."""

    session: MemorySession
    blocks: list[bytes]
    frames: list[int]
    ends_s: float


class MemoryDaemon:
    """One life of a daemon with so many frames, and one namespace.

    Attributes:
        visible: frame and parent of each block that a match finds.
        copying: frames that copies of the client use now, each as often as it is used.
        voided: frames of stores that were annulled while they were copied.
        trouble: what becomes of the next request of a type.
        late: requests that are posted are done when their reply is waited for, and not before.
        most: frames that one reservation gets at most.
        slow: how many blocks of a lease are not there yet, at first, when its frames are asked for.
    """

    def __init__(self, clock_s: Callable[[], float], frames: int, generation: int = 1) -> None:
        self.generation = generation
        self.memory = np.full((frames, BLOCK_BYTES), GARBAGE, np.uint8)
        self.visible: dict[bytes, tuple[int, bytes]] = {}
        self.pending: dict[bytes, Pending] = {}
        self.reads: dict[int, Read] = {}
        self.writes: dict[int, Write] = {}
        self.quarantine: dict[int, dict[int, int]] = {}
        self.free = list(range(frames))
        self.copying: list[int] = []
        self.trouble: dict[type[m.AnyRequest], Trouble] = {}
        self.late = False
        self.most = frames
        self.slow = 0
        self.problems: list[str] = []
        self.voided: set[int] = set()
        self.ended: set[tuple[MemorySession, int]] = set()
        self.alive = True
        self._clock_s = clock_s
        self._leases = 0

    # --- what happens by itself -------------------------------------------------------------------

    def expire(self) -> None:
        """End the leases whose time is up."""
        for lease in [lease for lease, held in self.reads.items() if held.ends_s <= self._clock_s()]:
            self.reads.pop(lease).good = False
        for lease in [lease for lease, held in self.writes.items() if held.ends_s <= self._clock_s()]:
            self._end_write(lease, finished=False)

    def flush(self, key: bytes) -> None:
        """Drop a block and all that follow it; leases over them are bad, and their frames have new owners at once."""
        if key in self.visible:
            frame, _ = self.visible.pop(key)
            for lease in self.reads.values():
                lease.good &= frame not in lease.frames
            self._set_free(frame)
        for other in [other for other, (_, parent) in self.visible.items() if parent == key]:
            self.flush(other)
        self._drop_held_below(key)

    def evict(self) -> None:
        """Drop one block that nothing holds and none follows."""
        held = {frame for lease in self.reads.values() for frame in lease.frames}
        parents = {parent for _, parent in self.visible.values()} | {entry.parent for entry in self.pending.values()}
        for key, (frame, _) in self.visible.items():
            if frame not in held and key not in parents:
                self.flush(key)
                return

    def end_session(self, session: MemorySession) -> None:
        """It is lost: its read leases end, and its frames wait in quarantine."""
        for lease, held in list(self.reads.items()):
            if session in held.holders:
                held.good = len(held.holders) > 1
                self._let_go(lease, held, session)
        for lease, write in list(self.writes.items()):
            if write.session is session:
                self._end_write(lease, finished=False)

    def _must(self, holds: bool, text: str) -> None:
        """Take note of what a client did wrong. Raised here, it might count as a miss."""
        if not holds:
            self.problems.append(text)

    def quarantined(self) -> list[int]:
        """Frames that a former holder of a lease may still write to."""
        return [frame for frames in self.quarantine.values() for frame in frames.values()]

    def check_integrity(self) -> None:
        """Each frame has one owner, each visible block its right bytes and a visible parent."""
        assert self.problems == []
        owners = [*self.free, *(frame for frame, _ in self.visible.values()), *self.quarantined()]
        owners += [entry.frame for entry in self.pending.values()]
        assert sorted(owners) == list(range(len(self.memory)))
        for key, (frame, parent) in self.visible.items():
            assert self.memory[frame].tobytes() == content(key)
            assert not parent or parent in self.visible
        for key, entry in self.pending.items():
            assert entry.complete or key in self.writes[entry.lease].blocks

    # --- requests ---------------------------------------------------------------------------------

    def answer(
        self, session: MemorySession, request: m.AnyRequest, payload: Any = None
    ) -> tuple[m.Reply, bytes | None]:
        """The reply, and its payload."""
        self.expire()
        ids = (request.request_id, self.generation)
        over = m.Error(*ids, m.ErrorCode.UNKNOWN_LEASE.value, "it is over")
        match request:
            case m.RegisterNamespace():
                return m.Namespace(*ids, 1, BLOCK_BYTES), None
            case m.Match():
                return self._match(session, request), None
            case m.Resolve(lease=lease) | m.Hold(lease=lease) | m.Read(lease=lease) if lease not in self.reads:
                return over, None
            case m.Resolve(lease=lease, first=first, count=count):
                read = self.reads[lease]
                there = read.frames[: read.resolvable]
                read.resolvable += self.slow or len(read.frames)
                frames = there[first : first + count]
                more = not frames and first < len(read.frames)
                return m.Frames(*ids, first, self._packed(frames), more=more), None
            case m.Hold(lease=lease):
                self.reads[lease].holders.append(session)
                self.ended.discard((session, lease))
                return m.Done(*ids), None
            case m.Release(lease=lease):
                held = self.reads.get(lease)
                self.ended.add((session, lease))
                good = held is not None and session in held.holders and held.good
                if held is not None:
                    self._let_go(lease, held, session)
                    copied = {*self.copying} & {*held.frames}
                    self._must(bool(held.holders) or not copied, "a lease is released while it is copied from")
                return m.Released(*ids, good), None
            case m.Renew(leases=leases, ttl_ms=ttl_ms):
                self._must(not self.ended & {(session, lease) for lease in leases}, "a lease that was ended is renewed")
                return m.Renewed(*ids, bytes(self._renew(lease, ttl_ms) for lease in leases)), None
            case m.Reserve():
                return self._reserve(session, request), None
            case m.Commit(lease=lease, blocks=blocks):
                return m.Committed(*ids, self._commit(lease, m.unpack_indices(blocks).tolist())), None
            case m.Abort(lease=lease, finished=finished):
                self.ended.add((session, lease))
                self._end_write(lease, finished=finished)
                return m.Done(*ids), None
            case m.Read(lease=lease, index=index, offset=offset, length=length):
                frame = self.reads[lease].frames[index]
                return m.Payload(*ids, length), self.memory[frame].tobytes()[offset : offset + length]
            case m.Write(lease=lease, index=index, offset=offset):
                if lease not in self.writes:
                    return over, None
                write = self.writes[lease]
                data = np.frombuffer(bytes(payload), np.uint8)
                self.memory[self.pending[write.blocks[index]].frame, offset : offset + len(data)] = data
                return m.Done(*ids), None
            case _:
                return m.Done(*ids), None

    def run(self, keys: bytes) -> int:
        """How many leading blocks are visible."""
        return sum(1 for _ in itertools.takewhile(self.visible.__contains__, split(keys)))

    def _match(self, session: MemorySession, request: m.Match) -> m.Reply:
        ids = (request.request_id, self.generation)
        blocks = self.run(request.keys)
        if not blocks or not request.ttl_ms:
            return m.Matched(*ids, blocks, 0, m.NO_LEASE)
        frames = [self.visible[key][0] for key in split(request.keys)[:blocks]]
        there = min(blocks, request.resolve)
        read = Read(frames, [session], self._clock_s() + request.ttl_ms / 1000, there if self.slow else blocks)
        self.reads[self._next_lease()] = read
        packed = [self._packed(frames[:there])] if request.resolve else []
        below = min(self.slow, blocks)
        return m.Matched(*ids, blocks - below, below, self._leases, packed)

    def _reserve(self, session: MemorySession, request: m.Reserve) -> m.Reply:
        ids = (request.request_id, self.generation)
        parent, keys = request.parent, split(request.keys)
        if parent and parent not in {**self.visible, **self.pending}:
            return m.Reserved(*ids, m.NO_LEASE, b"", b"", parent_missing=True)
        lease, states = self._next_lease(), []
        write = Write(session, [], [], self._clock_s() + request.ttl_ms / 1000)
        for key in keys:
            if key in self.visible:
                states.append(m.BlockState.HAVE)
            elif key in self.pending:
                states.append(m.BlockState.PENDING)
            elif self.free and len(write.frames) < self.most:
                frame = self.free.pop(0)
                self.pending[key] = Pending(frame, parent, lease)
                write.frames.append(frame)
                states.append(m.BlockState.FRAME)
            else:
                break
            write.blocks.append(key)
            parent = key
        states += [m.BlockState.NONE] * (len(keys) - len(states))
        if not write.frames:
            return m.Reserved(*ids, m.NO_LEASE, bytes(states), b"")
        self.writes[lease] = write
        return m.Reserved(*ids, lease, bytes(states), self._packed(write.frames))

    def _commit(self, lease: int, indices: list[int]) -> bytes:
        states = bytearray()
        write = self.writes.get(lease)
        for index in indices:
            if (frame := self.quarantine.get(lease, {}).pop(index, None)) is not None:
                self._must(frame not in self.copying, "a block is committed while it is copied")
                self._set_free(frame)  # the writer has come to its end
            entry = self.pending.get(write.blocks[index]) if write is not None else None
            if write is None or entry is None or entry.lease != lease:
                states.append(m.CommitState.DROPPED)
                continue
            key = write.blocks[index]
            self._must(entry.frame not in self.copying, "a block is committed while it is copied")
            self._must(entry.frame not in self.voided, "a block is committed though its store was annulled")
            self._must(self.memory[entry.frame].tobytes() == content(key), "wrong bytes are committed")
            entry.complete = True
            self._show(key)
            states.append(m.CommitState.VISIBLE if key in self.visible else m.CommitState.HELD)
        if write is not None and all(self._is_complete(one, lease) for one in write.blocks):
            del self.writes[lease]
        return bytes(states)

    def _is_complete(self, key: bytes, lease: int) -> bool:
        entry = self.pending.get(key)
        return entry is None or entry.lease != lease or entry.complete

    def _show(self, key: bytes) -> None:
        """Make a complete block visible, and those that wait for it, if the block before it is."""
        entry = self.pending[key]
        if entry.complete and (not entry.parent or entry.parent in self.visible):
            del self.pending[key]
            self.visible[key] = (entry.frame, entry.parent)
            for other in [one for one, waits in self.pending.items() if waits.parent == key]:
                self._show(other)

    def _renew(self, lease: int, ttl_ms: int) -> bool:
        held = self.reads.get(lease) or self.writes.get(lease)
        if held is None:
            return False
        held.ends_s = self._clock_s() + ttl_ms / 1000
        return True

    def _let_go(self, lease: int, held: Read, session: MemorySession) -> None:
        if session in held.holders:
            held.holders.remove(session)
        if not held.holders:
            del self.reads[lease]

    def _end_write(self, lease: int, *, finished: bool) -> None:
        left = self.quarantine.pop(lease, {})
        write = self.writes.pop(lease, None)
        for index, key in enumerate(write.blocks if write is not None else ()):
            entry = self.pending.get(key)
            if entry is not None and entry.lease == lease and not entry.complete:
                del self.pending[key]
                left[index] = entry.frame
                self._drop_held_below(key)
        if finished:
            self._must(not {*left.values()} & {*self.copying}, "a lease is given up as finished while it is copied to")
            for frame in left.values():
                self._set_free(frame)
        elif left:
            self.quarantine[lease] = left

    def _drop_held_below(self, key: bytes) -> None:
        for other in [one for one, entry in self.pending.items() if entry.parent == key]:
            if self.pending[other].complete:
                self._set_free(self.pending.pop(other).frame)
                self._drop_held_below(other)

    def _set_free(self, frame: int) -> None:
        self.memory[frame] = GARBAGE
        self.voided.discard(frame)
        self.free.append(frame)

    def _next_lease(self) -> int:
        self._leases += 1
        return self._leases

    def _packed(self, frames: Iterable[int]) -> bytes:
        return m.pack_frames([frame * BLOCK_BYTES for frame in frames])


class MemoryArena:
    """The daemon's memory as a client maps it."""

    def __init__(self, daemon: MemoryDaemon) -> None:
        self._base = daemon.memory.ctypes.data
        self.ended = False

    def begin_copy(self) -> bool:
        return not self.ended

    def end_copy(self) -> None:
        pass

    def addresses(self, frames: bytes, length: int, timeout_s: float) -> Any:
        return np.frombuffer(frames, "<u8").astype(np.int64) + self._base


@dataclass
class Posted:
    """A request whose reply is taken later."""

    request: m.AnyRequest
    expect: type[m.Reply]
    outcome: m.Reply | Exception | None = None


class MemorySession:
    """A session with one life of the daemon. It is over when `over` is true; `paused` while it is only down."""

    timeout_s = 1.0

    def __init__(self, client: MemoryClient, daemon: MemoryDaemon) -> None:
        self.daemon = daemon
        self.generation = daemon.generation
        self.token = os.urandom(16)
        self.welcome = m.Welcome(1, self.generation, self.token, "", "memory", daemon.memory.nbytes, False, 16)
        self.arena = MemoryArena(daemon) if client.map_arena else None
        self.paused = self.over = False
        self._client = client
        self._ids = 0

    def namespace_id(self, spec: NamespaceSpec) -> int:
        return self.call(m.RegisterNamespace, spec=spec).namespace

    def call(self, kind: type[m.AnyRequest], timeout_s: float = 1.0, **fields: Any) -> Any:
        return self.wait(self.post(kind, **fields))

    def post(self, kind: type[m.AnyRequest], timeout_s: float = 1.0, **fields: Any) -> Posted:
        if self.paused or self.over:
            raise DaemonUnavailable("down")
        self._ids += 1
        posted = Posted(kind(self._ids, self.token, self.generation, 1 << 62, **fields), m.reply_type(kind))
        self._client.under_way += 1
        if not self.daemon.late:
            self._perform(posted)
        return posted

    def wait(self, posted: Posted) -> Any:
        self._client.under_way -= 1
        if posted.outcome is None:
            self._perform(posted)
        if isinstance(posted.outcome, Exception):
            self.paused |= isinstance(posted.outcome, DeadlineExceeded)
            raise posted.outcome
        assert isinstance(posted.outcome, posted.expect)
        return posted.outcome

    def abandon(self, posted: Posted | None) -> None:
        if posted is not None:
            self._client.under_way -= 1
            if posted.outcome is None:
                self._perform(posted)
            if isinstance(posted.outcome, m.Reply):
                self._come_late(posted.outcome)

    def pipeline(self, orders: Iterable[Any], on_reply: Callable[..., None]) -> None:
        for place, (kind, fields, payload) in enumerate(orders):
            if self.paused or self.over:
                raise DaemonUnavailable("down")
            posted = Posted(kind(place, self.token, self.generation, 1 << 62, **fields), m.reply_type(kind))
            self._client.under_way += 1
            data = self._perform(posted, payload)
            on_reply(place, self.wait(posted), data)

    def give_back(self, kind: type[m.AnyRequest], **fields: Any) -> None:
        self._client.errands.append((self.generation, self.token, kind, fields))

    def _perform(self, posted: Posted, payload: Any = None) -> bytes | None:
        trouble = self.daemon.trouble.pop(type(posted.request), None)
        if trouble is Trouble.CUT_OFF or not self.daemon.alive or self.over:
            self._client.lose_session()
            posted.outcome = DaemonUnavailable("the daemon is gone")
            return None
        if trouble is Trouble.REFUSED:
            posted.outcome = RequestRefused(m.ErrorCode.LIMIT.value, "too much at once")
            return None
        if trouble is Trouble.UNHEARD:
            posted.outcome = DeadlineExceeded("no answer")
            return None
        reply, data = self.daemon.answer(self, posted.request, payload)
        posted.outcome = reply
        if isinstance(reply, m.Error):
            posted.outcome = RequestRefused(reply.code, reply.text)
        elif trouble is Trouble.UNANSWERED:
            self._come_late(reply)
            posted.outcome = DeadlineExceeded("no answer")
        return data

    def _come_late(self, reply: m.Reply) -> None:
        """What is granted too late is given back."""
        if isinstance(reply, m.Matched) and reply.lease:
            self.give_back(m.Release, lease=reply.lease)
        elif isinstance(reply, m.Reserved) and reply.lease:
            self.give_back(m.Abort, lease=reply.lease, finished=True)


class MemoryClient:
    """A client of the present life of a daemon, with the product's own leases."""

    forked = False
    warmth = 1.0
    wants_events = False

    def __init__(self, daemon: MemoryDaemon, clock_s: Callable[[], float], *, map_arena: bool = True) -> None:
        self.daemon = daemon
        self.map_arena = map_arena
        self.leases = Leases(clock_s)
        self.report = SelfReport()
        self.errands: deque[tuple[int, bytes, type[m.AnyRequest], dict[str, Any]]] = deque()
        self.times_up, self.times_down = 1, 0
        self.under_way = 0  # requests whose replies are neither taken nor given up
        self._session = MemorySession(self, daemon)

    @property
    def alive(self) -> bool:
        return not self._session.paused and not self._session.over

    def session(self) -> MemorySession:
        if not self.alive:
            raise DaemonUnavailable("down")
        return self._session

    def lose_session(self) -> None:
        session = self._session
        if not session.over:
            session.over = True
            self.times_down += 1
            if session.arena is not None:
                session.arena.ended = True
            session.daemon.end_session(session)

    def recover(self, daemon: MemoryDaemon) -> None:
        """Come up again, and do what the background thread does: end what could not be ended, renew leases."""
        self.daemon = daemon
        self._session.paused = False
        if self._session.over:
            self._session = MemorySession(self, daemon)
            self.times_up += 1
        self.tidy()

    def tidy(self) -> None:
        """See `Session.settle` and `Leases.renew`."""
        while self.errands:
            generation, token, kind, fields = self.errands.popleft()
            here = self._session
            if token == here.token or (kind is m.Abort and generation == here.generation):
                here.call(kind, **fields)
        self.leases.renew(self._session)  # type: ignore[arg-type]
        if self.errands:
            self.tidy()

    def expect(self, spec: NamespaceSpec) -> None:
        pass

    def close(self) -> None:
        self.leases.stop()


@dataclass
class WatchedCopier:
    """Copies in two halves, each told to the daemon; `meanwhile` is called between them. It may raise CopyLost."""

    copier: Copier
    client: MemoryClient
    meanwhile: Callable[[Limit], None] = field(default=lambda limit: None)

    def copy_in(self, addresses: Any, block_ids: Any, limit: Limit, after: Any = None) -> int:
        copy = self.copier.copy_in
        return self._halves(addresses, limit, lambda part: copy(addresses[part], block_ids[part], limit), out=False)

    def copy_out(self, block_ids: Any, addresses: Any, limit: Limit, after: Any = None) -> int:
        copy = self.copier.copy_out
        return self._halves(addresses, limit, lambda part: copy(block_ids[part], addresses[part], limit), out=True)

    def mark(self) -> Any:
        return None

    def _halves(self, addresses: Any, limit: Limit, copy: Callable[[slice], int], *, out: bool) -> int:
        daemon = self.client.daemon
        frames = [int(one) for one in (addresses - daemon.memory.ctypes.data) // BLOCK_BYTES]
        used = [frame for frame in frames if 0 <= frame < len(daemon.memory)]  # others: a staging buffer's
        daemon.copying += used
        try:
            half = len(addresses) // 2
            done = copy(slice(0, half))
            meanwhile, self.meanwhile = self.meanwhile, lambda limit: None
            meanwhile(limit)
            return done + copy(slice(half, len(addresses))) if done == half else done
        except CopyLost:
            if out:  # it may write for ever
                used.clear()
            raise
        finally:
            for frame in used:
                daemon.copying.remove(frame)
