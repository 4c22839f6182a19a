"""What all request handlers need: the cache, the caller's identity, checks of fields, and deferred answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tiercache.copies.arena import Region
from tiercache.daemon.cache import Cache
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import KEY_BYTES, ErrorCode

from .router import Answer
from .sessions import Session
from .unsent import Unsent

if TYPE_CHECKING:
    from tiercache.daemon.live_settings import LiveSettings

encoder = msgspec.msgpack.Encoder()

MAX_LEASED_KEYS_BYTES = 16 << 20
"""Limit per session of a tenant: the keys of its read leases that the daemon remembers, a million blocks."""

MAX_WINDOW_BLOCKS = 32_768
"""Of all windows that one request needs: each of these blocks is pinned, and checked again whenever anything is
dropped."""

_NO_KEY = bytes(KEY_BYTES)
"""What stands for the root in the rows of disks."""
Method = Callable[[Session, Any], "m.Reply | Steps[m.Reply] | Steps[m.Reply | None] | None"]
"""Answers one kind of request, perhaps in slices; returns None if the answer goes to `RequestContext.answer` later."""


def _nowhere(identity: bytes, answer: Answer) -> None:
    raise AssertionError("the service was not connected to a router")


def _not_resumed(identity: bytes, session: Session, request: m.AnyRequest, steps: Steps[Any]) -> None:
    raise AssertionError("the context was not connected to a service")


class RequestContext:
    """Shared by the classes that answer requests. Event loop only.

    Attributes:
        identity: the connection that the current request came by.
        tenant: the client's tenant: it can name only that tenant's namespaces. Empty for a trusted client.
        unsent: earlier answers that wait to be read.
        send: gives an answer to a connection, once there is a router.
        settings: what the daemon runs with.
        resume: runs the steps of a request that had to wait, and answers it.
    """

    def __init__(
        self,
        cache: Cache,
        generation: int,
        sessions: dict[bytes, Session],
        regions: Mapping[int, Region],
        lease_ttl_max_s: float,
        max_leases: int,
        region_bytes: int,
    ) -> None:
        self.cache = cache
        self.generation = generation
        self.sessions = sessions
        self.regions = regions
        self.lease_ttl_max_s = lease_ttl_max_s
        self.max_leases = max_leases
        self.region_bytes = region_bytes
        self.unsent = Unsent()
        self.identity = b""
        self.tenant = ""
        self.send: Callable[[bytes, Answer], None] = _nowhere
        self.settings: LiveSettings | None = None
        self.resume: Callable[[bytes, Session, m.AnyRequest, Steps[Any]], None] = _not_resumed

    def answer(self, identity: bytes, session: Session, reply: m.Reply) -> None:
        """Answer a deferred request."""
        self.send(identity, Answer(encoder.encode(reply), session))

    def namespace(self, number: int) -> Namespace:
        """The namespace of a number. Raises RequestRefused."""
        namespace = self.cache.space.namespaces.get(number)
        if namespace is None or (self.tenant and namespace.spec.tenant != self.tenant):
            raise RequestRefused(ErrorCode.UNKNOWN_NAMESPACE.value, f"{number} is not registered: register its spec")
        return namespace

    def namespaces(self, numbers: Sequence[int]) -> list[Namespace]:
        """The namespaces of a request, all different. Raises RequestRefused."""
        if not 0 < len(numbers) <= m.MAX_NAMESPACES_PER_REQUEST or len(set(numbers)) != len(numbers):
            text = f"{len(numbers)} namespaces: 1 to {m.MAX_NAMESPACES_PER_REQUEST} different ones are allowed"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        return [self.namespace(number) for number in numbers]

    def lease_ttl_s(self, session: Session, ttl_ms: int) -> float:
        """How long a new lease of the session may last. Raises RequestRefused when it has too many."""
        owner = session.owner
        if len(owner.reads) + len(owner.writes) >= self.max_leases:
            raise RequestRefused(ErrorCode.LIMIT.value, f"{self.max_leases} leases are open in this session")
        if self.tenant and sum(len(lease.keys) for lease in owner.reads.values()) >= MAX_LEASED_KEYS_BYTES:
            raise RequestRefused(ErrorCode.LIMIT.value, "the leases of this session hold too many blocks: release some")
        return min(positive(ttl_ms, "ttl_ms") / 1000, self.lease_ttl_max_s)


def positive(value: int, name: str) -> int:
    """The value of a field, if it is more than 0. Raises RequestRefused."""
    if value <= 0:
        raise RequestRefused(ErrorCode.BAD_VALUE.value, f"{name} is {value}: must be more than 0")
    return value


def check_keys(keys: bytes, limit: int) -> None:
    """Refuse anything but 1 to `limit` packed keys."""
    if not keys or len(keys) % KEY_BYTES:
        raise RequestRefused(ErrorCode.BAD_VALUE.value, f"keys are {len(keys)} bytes: 16 for each, at least one")
    if len(keys) > limit * KEY_BYTES:
        raise RequestRefused(ErrorCode.TOO_LARGE.value, f"{len(keys) // KEY_BYTES} keys: at most {limit} here")


def check_windows(namespaces: Sequence[Namespace], keys: bytes) -> None:
    """Refuse a look-up that would pin too many blocks one by one."""
    most = len(keys) // KEY_BYTES
    blocks = sum(min(one.spec.window_blocks, most) for one in namespaces)
    if blocks > MAX_WINDOW_BLOCKS:
        text = f"the windows of these namespaces are {blocks} blocks: at most {MAX_WINDOW_BLOCKS} in one request"
        raise RequestRefused(ErrorCode.TOO_LARGE.value, text)


def check_run(parent: bytes, keys: bytes) -> None:
    """Refuse keys that are not a run of a chain to store."""
    check_keys(keys, m.MAX_RESERVE)
    if any(keys[at : at + KEY_BYTES] == _NO_KEY for at in range(0, len(keys), KEY_BYTES)):
        raise RequestRefused(ErrorCode.BAD_VALUE.value, "one of the keys is zero: hashes are not")
    if len(parent) not in (0, KEY_BYTES) or parent == _NO_KEY:
        raise RequestRefused(ErrorCode.BAD_VALUE.value, f"parent is a key of {KEY_BYTES} bytes, not zero, or empty")


def check_range(offset: int, length: int, end: int) -> None:
    """Refuse bytes outside a block, or too many for one message."""
    if offset < 0 or not 0 < length <= m.MAX_PAYLOAD_BYTES or offset + length > end:
        text = f"bytes {offset} + {length} of {end}: must lie inside, at most {m.MAX_PAYLOAD_BYTES} in one message"
        raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
