"""What the scheduler of an engine asks of the cache: which blocks it has, and what is known of their use.

Nothing here moves a block. Each call is one round trip; a failure is a miss, counted and logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiercache.client.client import Client
from tiercache.client.session import Session
from tiercache.connector.direct.loads import DirectPath
from tiercache.connector.loads import Match, adopt_match, end_match, match_blocks
from tiercache.connector.outcomes import Outcomes
from tiercache.copies.pool import Pool
from tiercache.errors import TierCacheError
from tiercache.ground.uninterrupted import whole
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import (
    KEY_BYTES,
    MAX_PIN_TTL_MS,
    Hinted,
    Matched,
    ModelCard,
    Pin,
    Pinned,
    Prefetch,
    Unpin,
)
from tiercache.protocol.messages import Hint as HintRequest
from tiercache.protocol.namespaces import NamespaceSpec


class SchedulerSide:
    """The part of a `Connector` that moves no blocks. Thread-safe."""

    def __init__(self, client: Client, namespace: NamespaceSpec, pool: Pool | None, direct: DirectPath) -> None:
        self.namespace = namespace
        self.pool = pool
        self.direct = direct
        self._client = client
        self._outcomes = Outcomes()

    @property
    def available(self) -> bool:
        """False while the daemon is down; calls are then misses at once."""
        return self._client.alive

    @property
    def client(self) -> Client:
        """The client underneath, for requests without a method here."""
        return self._client

    @property
    def counters(self) -> dict[str, int]:
        """Counts of this connector's work; see `tiercache.connector.outcomes.COUNTERS`."""
        lives = {"times_up": self._client.times_up, "times_down": self._client.times_down}
        return {**self._outcomes.counts(), **lives, **self.direct.counters()}

    @property
    def wants_events(self) -> bool:
        """True if the daemon publishes KV events, so that stores should bring an `EventRun`. False while it is down."""
        return self._client.wants_events

    def _is_up(self, counter: str) -> bool:
        if self._client.alive:
            return True
        self._outcomes.unavailable(counter, self._client.forked)
        return False

    # --- matching --------------------------------------------------------------------------------

    @whole
    def match(self, keys: bytes, *, namespaces: Sequence[NamespaceSpec] | None = None) -> Match:
        """The longest leading run of `keys` that the cache has, under a read lease.

        Args:
            keys: 16 bytes for each block from the root on, as `KeyChain.packed` gives them.
            namespaces: all of these must have the run (the ranks of one engine); by default the
                connector's own.

        Load or release the result. Blocks for one round trip. A failure is `blocks == 0`.
        """
        check_keys(keys)
        if not keys or not self._is_up("matches"):
            return Match()
        try:
            specs, loads = self._specs(namespaces), self.pool is not None
            match = match_blocks(self._client, keys, specs, with_frames=loads, extents=self.direct.wanted)
        except TierCacheError as error:
            self._outcomes.failed("match", error)
            return Match()
        self._outcomes.succeeded("match", matches=1, matched_blocks=match.blocks)
        return match

    @whole
    def adopt(self, ticket: bytes) -> Match:
        """The match behind `Match.ticket()` of another process of this instance; a miss if it is over.

        Both processes then hold the lease, and each ends its own hold.
        """
        if not self._is_up("adoptions"):
            return Match()
        try:
            return adopt_match(self._client, ticket)
        except TierCacheError as error:
            self._outcomes.failed("adopt", error)
            return Match()

    @whole
    def release(self, match: Match) -> None:
        """End a match that is not loaded. Does nothing for one that is over, or a miss."""
        end_match(self._client, match)

    # --- requests --------------------------------------------------------------------------------

    @whole
    def prefetch(self, keys: bytes, *, namespaces: Sequence[NamespaceSpec] | None = None) -> int:
        """Promote into DRAM what `match` would find of `keys` in `namespaces`; returns its blocks. 0 on failure."""
        check_keys(keys)

        def ask(session: Session, namespace_ids: list[int]) -> int:
            reply = session.call(Prefetch, Matched, namespaces=namespace_ids, keys=keys)
            return reply.dram_blocks + reply.below_blocks

        return self._ask("prefetch", ask, namespaces) if keys else 0

    @whole
    def hint(
        self, keys: bytes, hint: Hint, *, first: int = 0, namespaces: Sequence[NamespaceSpec] | None = None
    ) -> int:
        """Send a hint about blocks `first..` of the chain `keys`, as far as no other chain shares them.

        `namespaces`: by default the connector's own. Returns how many of `keys` are in any tier; 0 on
        failure. Blocks for one round trip.
        """
        check_keys(keys)
        if first < 0:
            raise ValueError(f"first is {first}: must be 0 or more")

        def ask(session: Session, namespace_ids: list[int]) -> int:
            reply = session.call(HintRequest, Hinted, namespaces=namespace_ids, keys=keys, first=first, **hint.fields())
            self._outcomes.count(hints=1)
            return reply.blocks

        return self._ask("hint", ask, namespaces) if keys else 0

    @whole
    def pin(self, keys: bytes, ttl_s: float) -> int:
        """Keep the stored run of `keys` from eviction for `ttl_s`; returns its blocks. 0 on failure."""
        check_keys(keys)
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s}: must be more than 0")
        ttl_ms = min(MAX_PIN_TTL_MS, max(1, round(ttl_s * 1000)))
        return self._ask(
            "pin", lambda session, ids: session.call(Pin, Pinned, namespaces=ids, keys=keys, ttl_ms=ttl_ms).blocks
        )

    @whole
    def unpin(self, keys: bytes) -> int:
        """End the pins that were set with the same keys; returns blocks. 0 on failure."""
        check_keys(keys)
        return self._ask("unpin", lambda session, ids: session.call(Unpin, Pinned, namespaces=ids, keys=keys).blocks)

    def _ask(
        self,
        operation: str,
        ask: Callable[[Session, list[int]], int],
        namespaces: Sequence[NamespaceSpec] | None = None,
    ) -> int:
        """What `ask` returns for the ids of `namespaces`, by default the connector's own; 0 on failure."""
        try:
            session = self._client.session()
            blocks = ask(session, [session.namespace_id(spec) for spec in self._specs(namespaces)])
        except TierCacheError as error:
            self._outcomes.failed(operation, error)
            return 0
        self._outcomes.succeeded(operation)
        return blocks

    def _specs(self, namespaces: Sequence[NamespaceSpec] | None) -> Sequence[NamespaceSpec]:
        return (self.namespace,) if namespaces is None else tuple(namespaces)

    def flush(self, *, tier: str = "all", key: bytes = b"", all_namespaces: bool = False) -> int:
        """Drop blocks: `key` and all that follow it, or everything; returns how many.

        Of this connector's namespace, or of every one; of a windowed one only `key` itself. Unlike the rest this
        raises when it fails (DaemonUnavailable, RequestRefused): the caller must know whether it was done.
        """
        namespaces = () if all_namespaces else (self.namespace,)
        return self._client.flush(tier=tier, namespaces=namespaces, key=key)

    def announce(self, models: Sequence[ModelCard]) -> None:
        """Announce the models of which this process stores blocks, so that others can query how much is stored.

        Replaces what was announced before. Without it `tiercache affinity` does not know the model.
        """
        self._client.announce(models)

    def stats(self) -> dict[str, Any]:
        """`available`, `client` (the counters here) and `daemon` (its statistics; empty when down)."""
        daemon: dict[str, Any] = {}
        try:
            daemon = self._client.stats()
        except TierCacheError as error:
            self._outcomes.failed("stats", error)
        return {"available": self.available, "client": self.counters, "daemon": daemon}


def check_keys(keys: bytes) -> None:
    """Raise TypeError for keys that are not bytes, ValueError for keys that are cut off."""
    if not isinstance(keys, (bytes, bytearray, memoryview)):
        raise TypeError(f"keys are bytes, one key after another, not {type(keys).__name__}")
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys are {KEY_BYTES} bytes each, and these are {len(keys)} bytes")
