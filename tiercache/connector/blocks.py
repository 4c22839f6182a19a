"""What one load or store moves: blocks of the pool, their places in the chain, and when to stop.

    chain      0 .... first ............ first + len ..
    pool              ids[0] ... ids[-1]

A transfer goes in windows, each a `part` of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tiercache.client.session import Session
from tiercache.copies.pool import Addresses, Limit
from tiercache.protocol.messages import KEY_BYTES, MAX_PAYLOAD_BYTES, EventRun
from tiercache.protocol.namespaces import NamespaceSpec

WINDOW_BLOCKS = 128
WINDOW_BYTES = 128 << 20
"""The largest window of a store: blocks that wait for their copy are of no use yet."""
TOKEN_ID_BYTES = 4


class LeasedBlocks(NamedTuple):
    """What a read lease holds of one namespace, in the session that granted it."""

    session: Session
    lease: int
    namespace_id: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of the pool that are loaded: `ids[i]` becomes block `first + i` of the chain, or is it.

    Attributes:
        limit: no copy begins after it.
        after: result of `Copier.mark`: the copies follow that work of the device.
    """

    ids: Addresses
    first: int
    limit: Limit
    after: Any = None

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, begin: int, end: int) -> Blocks:
        """The blocks `begin ..< end` of these, as far as they exist."""
        if begin == 0 and end >= len(self.ids):
            return self
        return Blocks(self.ids[begin:end], self.first + begin, self.limit, self.after)


@dataclass(frozen=True, slots=True)
class NewBlocks(Blocks):
    """Blocks of the pool that are stored.

    Attributes:
        keys: of the chain from the root, at least up to the last of these blocks.
        events: what KV events say of these blocks.
    """

    keys: bytes = b""
    events: EventRun | None = None

    def part(self, begin: int, end: int) -> NewBlocks:
        """See `Blocks.part`."""
        if begin == 0 and end >= len(self.ids):
            return self
        ids = self.ids[begin:end]
        events = self.events and self.events.part(begin, len(ids))
        return NewBlocks(ids, self.first + begin, self.limit, self.after, self.keys, events)

    @property
    def own_keys(self) -> bytes:
        """The keys of these blocks, without those before them in the chain."""
        return self.keys[self.first * KEY_BYTES : (self.first + len(self.ids)) * KEY_BYTES]

    def reserve_fields(self, namespace_id: int, ttl_ms: int) -> dict[str, Any]:
        """How a request names them to reserve frames or places for them."""
        begin = self.first * KEY_BYTES
        parent = self.keys[max(0, begin - KEY_BYTES) : begin]
        return {
            "namespace": namespace_id,
            "parent": parent,
            "keys": self.own_keys,
            "ttl_ms": ttl_ms,
            "events": self.events,
        }

    def for_daemon(self, session: Session, spec: NamespaceSpec) -> NewBlocks:
        """With `events` only if the daemon publishes them and the tokens of a window fit into a request."""
        if self.events is None:
            return self
        fits = WINDOW_BLOCKS * spec.block_size * TOKEN_ID_BYTES <= MAX_PAYLOAD_BYTES
        return self if session.welcome.kv_events and fits else replace(self, events=None)
