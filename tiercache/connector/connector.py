"""The engine's side of the cache: match a prompt's blocks, load them, store new ones.

    >>> import numpy as np, tiercache
    >>> daemon = tiercache.launch("64MiB")
    >>> pool = np.zeros((8, 4096), np.uint8)              # 8 blocks of 4096 bytes
    >>> spec = tiercache.NamespaceSpec(
    ...     engine="example/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=4096
    ... )
    >>> connector = tiercache.connect(
    ...     daemon.address, namespace=spec, pool=tiercache.Pool.from_blocks(pool)
    ... )
    >>> chain = tiercache.KeyChain(tiercache.root_key("example model"), block_size=4)
    >>> chain.extend(range(13))                           # 13 tokens: 3 full blocks
    3
    >>> pool[0:3] = [[1], [2], [3]]                       # the engine computes blocks 0, 1, 2
    >>> connector.store(chain.packed(), [0, 1, 2])
    StoreResult(stored=3, present=0, dropped=0, parent_missing=False)
    >>> match = connector.match(chain.packed())           # another request, same tokens
    >>> match.blocks
    3
    >>> connector.load(match, [5, 6, 7])                  # into other blocks
    3
    >>> pool[5:8, 0].tolist()
    [1, 2, 3]
    >>> connector.close(); daemon.close()

What an engine must know:

- **Good or miss.** Only what `load` returns as good may be computed with or kept: the daemon has
  confirmed, after the copies, that the blocks were still the ones that were matched. Without that
  confirmation the result is 0, whatever was copied.
- **Blocks in a transfer belong to it** until `Transfer.done()`; a synchronous call has ended its
  copies when it returns. Cancelling or a deadline only keeps further copies from beginning.
- **A failing cache is a miss.** A dead, slow or refusing daemon costs one request deadline, then
  calls return at once until a background thread has found it again. Failures are counted in
  `counters` and logged when they begin and end. Only bad arguments raise (LayoutError, ValueError).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tiercache.client.client import Client
from tiercache.client.session import REQUEST_TIMEOUT_S, Session
from tiercache.config.daemon_config import default_address
from tiercache.connector.blocks import Blocks, NewBlocks
from tiercache.connector.direct.backend import Backend
from tiercache.connector.direct.loads import DirectPath
from tiercache.connector.jobs import JobQueue, Transfer
from tiercache.connector.loads import Match, adopt_match, end_match, load_blocks, match_blocks
from tiercache.connector.mover import Mover
from tiercache.connector.outcomes import Outcomes
from tiercache.connector.stores import StoreResult, store_blocks
from tiercache.copies.pool import BlockIds, CopyLost, Limit, Pool, make_copier
from tiercache.errors import (
    ConfigError,
    LayoutError,
    TierCacheError,
)
from tiercache.ground.uninterrupted import whole
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import (
    KEY_BYTES,
    MAX_PIN_TTL_MS,
    EventRun,
    ModelCard,
    Pin,
    Prefetch,
    Unpin,
)
from tiercache.protocol.messages import Hint as HintRequest
from tiercache.protocol.namespaces import NamespaceSpec

LOAD_TIMEOUT_S = 10.0
STORE_TIMEOUT_S = 60.0
MAX_QUEUED_LOADS = 256
MAX_QUEUED_STORES = 64
MAX_QUESTIONS = 1024
RAMP_FLOOR_BYTES = 64 << 20
"""A store of this size proceeds whole even just after the daemon came back."""

T = TypeVar("T")


def check_keys(keys: bytes) -> None:
    """Raise TypeError for keys that are not bytes, ValueError for keys that are cut off."""
    if not isinstance(keys, (bytes, bytearray, memoryview)):
        raise TypeError(f"keys are bytes, one key after another, not {type(keys).__name__}")
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys are {KEY_BYTES} bytes each, and these are {len(keys)} bytes")


def connect(
    address: str | Path | None = None,
    *,
    namespace: NamespaceSpec,
    pool: Pool | None = None,
    name: str = "",
    instance: bytes | None = None,
    required: bool = False,
    warn: bool = True,
    map_arena: bool = True,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    connect_timeout_s: float = 5.0,
    gds: str | Backend = "off",
    gds_store: bool = False,
    tenant: str = "",
) -> Connector:
    """A connector to the daemon at `address`.

    Args:
        address: the daemon's run directory; by default the default one.
        namespace: the form of this engine's blocks.
        pool: where its blocks are; None for a process that only matches (a scheduler).
        name: this client's name in the daemon's statistics.
        instance: 16 random bytes that all processes of one engine share; see `Connector.adopt`.
        required: raise DaemonUnavailable when no daemon answers. By default the connector begins unavailable and finds
            the daemon when it comes: an engine must start without its cache.
        warn: log that there is no daemon yet; False for callers that log it themselves.
        map_arena: False moves bytes through the control socket instead of shared memory.
        request_timeout_s: deadline of one request to the daemon.
        load_timeout_s: default deadline of a load.
        connect_timeout_s: deadline of connecting, if `required`.
        gds: `auto` reads blocks from NVMe straight into the GPU if a probe, in the background, finds that this works
            and is faster; `off` leaves all reading to the daemon. Off by default: the GPU part has not been run on a
            GPU yet. A `tiercache.connector.direct.backend.Backend` is used as it is.
        gds_store: with `gds`, also write new blocks from the GPU straight to NVMe, bypassing DRAM, if the probe finds
            that this works and is faster. Blocks that NVMe does not take go to DRAM as usual. For caches whose DRAM is
            small beside their disks: such blocks are read from the disk each time.
        tenant: owner of these blocks, for the daemon's quotas. Only the same tenant finds them.

    Raises:
        ConfigError: a namespace that cannot be served.
        LayoutError: a pool that does not fit the namespace, or a GPU that cannot be used.
    """
    if tenant:
        namespace = namespace.of_tenant(tenant)
    if problem := namespace.problem():
        raise ConfigError(f"this namespace cannot be served: {problem}")
    if pool is not None:
        _check_fit(namespace, pool)
    client = Client(
        address or default_address(),
        name=name,
        instance=instance,
        map_arena=map_arena and pool is not None,
        cuda=pool is not None and pool.device != "cpu",
        request_timeout_s=request_timeout_s,
    )
    try:
        connector = Connector(client, namespace, pool, load_timeout_s=load_timeout_s, gds=gds, gds_store=gds_store)
    except BaseException:
        client.close()
        raise
    try:
        client.expect(namespace)
        client.start(connect_timeout_s, required=required, warn=warn)
    except BaseException:
        connector.close()
        raise
    return connector


class Connector:
    """One engine process's access to the cache. Thread-safe. Made by `connect`; close it when done.

    One that is dropped without `close` is closed in the background when Python collects it, after its transfers.

    Attributes:
        namespace: the form of this engine's blocks.
        pool: where they are, or None.
        direct: whether blocks on NVMe are read and written without the daemon, and what the probe found.
    """

    def __init__(
        self,
        client: Client,
        namespace: NamespaceSpec,
        pool: Pool | None,
        *,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        gds: str | Backend = "off",
        gds_store: bool = False,
        sibling_of: Connector | None = None,
    ) -> None:
        """Arguments as for `connect`; with `sibling_of` it uses the client of that connector, and leaves it open."""
        # First, as it may fail: the direct path starts a thread.
        self._mover = None if pool is None else Mover(make_copier(pool), pool.block_bytes)
        self.namespace = namespace
        self.pool = pool
        self.direct = DirectPath(client, namespace, pool, gds, gds_store)
        self._client = client
        self._outcomes = Outcomes()
        self.load_timeout_s = load_timeout_s
        self._loads = JobQueue("tiercache-load", MAX_QUEUED_LOADS)
        self._stores = JobQueue("tiercache-store", MAX_QUEUED_STORES)
        self._questions = JobQueue("tiercache-lookup", MAX_QUESTIONS)
        self._siblings: list[Connector] = []
        self._sibling_of = sibling_of  # kept, since it closes the client
        client.report.include(self)
        queues = self._questions, self._loads, self._stores
        weakref.finalize(self, _stop, queues, self.direct).atexit = False

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

    # --- for an engine's scheduler: one round trip each, and no block is moved ------------------------

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
            reply = session.call(Prefetch, namespaces=namespace_ids, keys=keys)
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
            reply = session.call(HintRequest, namespaces=namespace_ids, keys=keys, first=first, **hint.fields())
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
        return self._ask("pin", lambda session, ids: session.call(Pin, namespaces=ids, keys=keys, ttl_ms=ttl_ms).blocks)

    @whole
    def unpin(self, keys: bytes) -> int:
        """End the pins that were set with the same keys; returns blocks. 0 on failure."""
        check_keys(keys)
        return self._ask("unpin", lambda session, ids: session.call(Unpin, namespaces=ids, keys=keys).blocks)

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

        Of this connector's namespace, or of every one, if there is no `key` or no shared store; of a windowed one only
        `key` itself. Unlike the rest this
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

    def reported(self) -> dict[str, int]:
        """The counters for the daemon's statistics: the client went up and down once for all siblings."""
        return self._outcomes.counts() if self._sibling_of else self.counters

    def sibling(self, namespace: NamespaceSpec, pool: Pool) -> Connector:
        """A connector for other blocks of the same engine, e.g. of another group of layers, over the same client.

        It is closed with this one. Raises ConfigError and LayoutError as `connect`.
        """
        _check_fit(namespace, pool)
        self._client.expect(namespace)
        other = Connector(self._client, namespace, pool, load_timeout_s=self.load_timeout_s, sibling_of=self)
        self._siblings.append(other)
        return other

    # --- questions in the background ---------------------------------------------------------------

    def ask_async(self, question: Callable[[], T], miss: T) -> Transfer[T]:
        """Call `question`, which asks this connector (`match`, `prefetch`), in the background; they run in order.

        The result is `miss` if the transfer is cancelled before the question has begun, and when too many wait. A
        match that comes after its asker has gone is the asker's to release.
        """
        transfer = Transfer(question, lambda: miss, miss, Limit())
        return transfer if self._questions.submit(transfer) else Transfer.finished(miss)

    def release_async(self, match: Match) -> None:
        """As `release`, in the background after the questions asked before."""
        self._questions.begin_with(partial(self.release, match))

    # --- loading ---------------------------------------------------------------------------------

    @whole
    def load(self, match: Match, block_ids: BlockIds, *, first: int = 0, timeout_s: float | None = None) -> int:
        """Copy blocks `first..` of a match into the pool blocks `block_ids`, and end the match.

        Returns how many leading blocks of `block_ids` are good; the others hold anything. Begins no further copy after
        `timeout_s`. Blocks until the copies have ended, through Ctrl-C too.
        """
        return self._perform_load(match, self._blocks_to_load(block_ids, first, timeout_s))

    def load_async(
        self, match: Match | bytes, block_ids: BlockIds, *, first: int = 0, timeout_s: float | None = None
    ) -> Transfer[int]:
        """As `load`, in the background. On a GPU it follows the work that the calling thread has queued so far.

        The match may be a ticket, which is then adopted in the background too.
        """
        blocks = self._blocks_to_load(block_ids, first, timeout_s)
        if self._client.alive:
            transfer = Transfer(
                lambda: self._perform_load(match, blocks), lambda: self._skip_load(match), 0, blocks.limit
            )
            try:
                if self._loads.submit(transfer):
                    return transfer
            except BaseException:  # a signal handler's: the caller reuses the blocks
                transfer.abandon()
                raise
        return Transfer.finished(self._skip_load(match))

    def _blocks_to_load(self, block_ids: BlockIds, first: int, timeout_s: float | None) -> Blocks:
        ids = self._own_pool().check_ids(block_ids, writing=True)
        if first < 0:
            raise ValueError(f"first is {first}: must be 0 or more")
        limit = Limit(time.monotonic() + (self.load_timeout_s if timeout_s is None else timeout_s))
        return Blocks(ids, first, limit, self._mark())

    def _perform_load(self, match: Match | bytes, blocks: Blocks) -> int:
        match = self.adopt(match) if isinstance(match, bytes) else match
        try:
            mover, loader = self._own_mover(), self.direct.loader
            good = load_blocks(self._client, mover, self.namespace, match, blocks, loader)
        except CopyLost:
            raise
        except TierCacheError as error:
            self._outcomes.failed("load", error)
            self._outcomes.count(loads=1, loads_short=1)
            return 0
        short = int(good < min(len(blocks), match.blocks - blocks.first))
        size = good * self.namespace.block_bytes
        self._outcomes.succeeded("load", loads=1, loads_short=short, loaded_blocks=good, loaded_bytes=size)
        return good

    def _skip_load(self, match: Match | bytes) -> int:
        self._outcomes.count(loads=1, loads_short=1)
        if isinstance(match, Match):
            self.release(match)
        return 0

    # --- storing ---------------------------------------------------------------------------------

    @whole
    def store(
        self,
        keys: bytes,
        block_ids: BlockIds,
        *,
        first: int = 0,
        events: EventRun | None = None,
        hint: Hint | None = None,
    ) -> StoreResult:
        """Keep the pool blocks `block_ids` as blocks `first..` of the chain `keys`.

        Args:
            keys: the chain from the root, 16 bytes each, at least up to the last block.
            block_ids: the pool blocks of `keys[first : first + len(block_ids)]`.
            events: what KV events say of these blocks; see `wants_events`.
            hint: what is known of their further use; see `hint`, which is sent once they are stored.

        Blocks until the copies have ended, through Ctrl-C too.
        """
        return self._perform_store(self._blocks_to_store(keys, block_ids, first, events), hint)

    def store_async(
        self,
        keys: bytes,
        block_ids: BlockIds,
        *,
        first: int = 0,
        events: EventRun | None = None,
        hint: Hint | None = None,
        proof: Callable[[], bool] | None = None,
    ) -> Transfer[StoreResult]:
        """As `store`, in the background. On a GPU it follows the work that the calling thread has queued so far.

        The blocks must not change before the transfer is done. A full queue drops the store. `proof` is called in the
        background once blocks are copied, perhaps several times: when it is False they are not committed.
        """
        blocks = self._blocks_to_store(keys, block_ids, first, events)
        blocks.limit.proof = proof
        count = len(blocks)
        if self._client.alive:
            dropped = StoreResult(dropped=count)
            transfer = Transfer(
                lambda: self._perform_store(blocks, hint), lambda: self._skip_store(count), dropped, blocks.limit
            )
            try:
                if self._stores.submit(transfer):
                    return transfer
            except BaseException:  # a signal handler's: the caller reuses the blocks
                transfer.abandon()
                raise
        return Transfer.finished(self._skip_store(count))

    def _blocks_to_store(self, keys: bytes, block_ids: BlockIds, first: int, events: EventRun | None) -> NewBlocks:
        check_keys(keys)
        ids = self._own_pool().check_ids(block_ids)
        if first < 0 or (first + len(ids)) * KEY_BYTES > len(keys):
            raise ValueError(
                f"{len(ids)} blocks from block {first} on need {first + len(ids)} keys from the root; "
                f"there are {len(keys) // KEY_BYTES}"
            )
        if events is not None and len(events.hashes) != len(ids):
            raise ValueError(f"events name {len(events.hashes)} blocks, and {len(ids)} are stored")
        limit = Limit(time.monotonic() + STORE_TIMEOUT_S)
        return NewBlocks(ids, first, limit, self._mark(), bytes(keys), events)

    def _perform_store(self, blocks: NewBlocks, hint: Hint | None) -> StoreResult:
        admitted = self._admitted(len(blocks))
        result = StoreResult()
        try:
            if admitted and self._is_up("stores"):
                mover, storer = self._own_mover(), self.direct.storer
                result = store_blocks(self._client, mover, self.namespace, blocks.part(0, admitted), storer)
                self._outcomes.succeeded("store", stores=1)
        except CopyLost:
            raise
        except TierCacheError as error:
            self._outcomes.failed("store", error)
        kept = result.stored + result.present
        result = result._replace(dropped=len(blocks) - kept)
        self._outcomes.count(
            stored_blocks=result.stored,
            stored_bytes=result.stored * self.namespace.block_bytes,
            dropped_blocks=result.dropped,
        )
        if hint is not None and kept:
            self.hint(blocks.keys[: (blocks.first + kept) * KEY_BYTES], hint, first=blocks.first)
        return result

    def _skip_store(self, count: int) -> StoreResult:
        self._outcomes.count(dropped_blocks=count)
        return StoreResult(dropped=count)

    def _admitted(self, count: int) -> int:
        """How many leading blocks of a store may proceed: fewer just after the daemon came back.

        All its clients come back in the same second, to an empty cache.
        """
        share = self._client.warmth
        if share >= 1:
            return count
        floor = RAMP_FLOOR_BYTES // self.namespace.block_bytes
        return min(count, max(1, floor, int(count * share)))

    def hint_async(self, keys: bytes, hint: Hint) -> Transfer[int]:
        """As `hint`, in the background, after all stores queued before by `store_async`.

        A full queue drops it.
        """
        check_keys(keys)
        transfer = Transfer(lambda: self.hint(keys, hint), lambda: 0, 0, Limit())
        return transfer if self._stores.submit(transfer) else Transfer.finished(0)

    def close(self) -> None:
        """Finish the transfers that have begun, drop the others, and end the session. Blocks for seconds."""
        for sibling in self._siblings:
            sibling.close()
        self._questions.close()
        self._loads.close()
        self._stores.close()
        self.direct.close()
        if self._sibling_of is None:
            self._client.close()

    def __enter__(self) -> Connector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_pool(self) -> Pool:
        if self.pool is None:
            raise LayoutError("this connector has no pool: pass pool= to connect")
        return self.pool

    def _own_mover(self) -> Mover:
        self._own_pool()
        assert self._mover is not None
        return self._mover

    def _mark(self) -> Any:
        """See `Copier.mark`. A forked child has no device to ask, and its copies never begin."""
        return None if self._client.forked else self._own_mover().copier.mark()


def _stop(queues: Iterable[JobQueue], direct: DirectPath) -> None:
    """End what a dropped connector has begun; its client ends by itself. Never blocks."""
    for queue in queues:
        queue.stop()
    direct.close()


def _check_fit(namespace: NamespaceSpec, pool: Pool) -> None:
    if pool.block_bytes != namespace.block_bytes:
        raise LayoutError(
            f"a block of the pool has {pool.block_bytes} bytes and the namespace says "
            f"{namespace.block_bytes}: one of them is wrong"
        )
