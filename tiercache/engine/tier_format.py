"""Cache format: keeps blocks in the cache in fewer bits than in a raw pool.

    store   pool blocks ─encode─► stage ─► cache        load   cache ─► stage ─decode─► pool blocks

The stage is a small separate pool, which the connector moves. Blocks without room there wait: a transfer passes through
the stage in pieces, each after the one before has ended. It advances whenever the engine's thread asks whether it is
done, and only then.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from tiercache.engine.cache import GroupLike, MatchLike, TransferLike
from tiercache.engine.kv_pool import KVLayout, KVPool
from tiercache.errors import TierCacheError
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import KEY_BYTES, EventRun, ModelCard
from tiercache.protocol.namespaces import NamespaceSpec

_STAGE_BYTES = 64 << 20
_LEAST_STAGE_BLOCKS = 16
T = TypeVar("T")


class StagedMatch(NamedTuple):
    """A match and the keys that were asked for: a load in several pieces asks again."""

    inner: MatchLike
    keys: bytes

    @property
    def blocks(self) -> int:
        return self.inner.blocks

    @property
    def below_blocks(self) -> int:
        return self.inner.below_blocks

    @property
    def shared_blocks(self) -> int:
        return self.inner.shared_blocks


class StagedStoreResult(NamedTuple):
    """The connector's result, summed up over all pieces."""

    stored: int = 0
    present: int = 0
    dropped: int = 0
    parent_missing: bool = False


class _Staged(ABC):
    """A transfer of `block_ids` in pieces through the stage; see TransferLike.

    A piece that the cache refuses ends it; `result` raises that error, `done` none.
    """

    def __init__(self, cache: StagedCache, block_ids: Sequence[int], first: int) -> None:
        self._cache = cache
        self._block_ids = list(block_ids)
        self._first = first
        self._moved = 0
        self._places: list[int] = []
        self._piece: TransferLike | None = None
        self._ended = self._cancelled = False
        self._error: TierCacheError | None = None
        self.began_s = self.ended_s = 0.0

    def done(self) -> bool:
        """True if no copy runs or will run. Takes the next step if the last is over."""
        if self._piece is not None and self._piece.done():
            piece, self._piece = self._piece, None
            self.began_s, self.ended_s = self.began_s or piece.began_s, piece.ended_s
            went_well = self._try(lambda: self._finish(piece))
            self._cache.free(self._places)
            self._moved += len(self._places)
            self._ended |= not went_well or self._moved == len(self._block_ids)
        if self._piece is None and not self._ended:
            self._ended = self._cancelled or not self._begin()
        return self._ended and self._piece is None

    def _try(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except TierCacheError as error:
            self._error = error
            return False

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._cancelled = True
        if self._piece is not None:
            self._piece.cancel()

    def _begin(self) -> bool:
        """Start the next piece, if there is room for it now; False if there is no point in continuing."""
        count = min(len(self._block_ids) - self._moved, self._cache.room())
        if count == 0:
            return True
        self._places = self._cache.take(count)
        block_ids = self._block_ids[self._moved : self._moved + count]
        started = self._try(lambda: self._start(block_ids))
        if not started:
            self._cache.free(self._places)
        return started

    @abstractmethod
    def _start(self, block_ids: list[int]) -> bool:
        """Begin `_piece`, between `block_ids` and `_places`; False if there is nothing to transfer."""

    @abstractmethod
    def _finish(self, piece: TransferLike) -> bool:
        """Take the result of a piece; False if nothing should follow it."""


class StagedStore(_Staged):
    """See the module. Blocks are encoded in order, so that no piece comes before its parents."""

    def __init__(
        self,
        cache: StagedCache,
        keys: bytes,
        block_ids: Sequence[int],
        first: int,
        events: EventRun | None = None,
        hint: Hint | None = None,
    ) -> None:
        super().__init__(cache, block_ids, first)
        self._keys = keys
        self._events = events
        self._hint = hint
        self._result = StagedStoreResult()
        self.done()

    def result(self, timeout_s: float = 0.0) -> StagedStoreResult:
        """The result; ask when it is done. Raises TierCacheError."""
        self._raise_error()
        done = self._result.stored + self._result.present
        return self._result._replace(dropped=len(self._block_ids) - done)

    def _start(self, block_ids: list[int]) -> bool:
        self._cache.encode(block_ids, self._places)
        first = self._first + self._moved
        keys = self._keys[: (first + len(block_ids)) * KEY_BYTES]
        events = self._events and self._events.part(self._moved, len(block_ids))
        self._piece = self._cache.inner.store_async(keys, self._places, first=first, events=events, hint=self._hint)
        return True

    def _finish(self, piece: TransferLike) -> bool:
        got = piece.result(0)
        stored, present, _, missing = self._result
        self._result = StagedStoreResult(
            stored + got.stored, present + got.present, 0, missing or (got.parent_missing and not self._moved)
        )
        return bool(got.stored + got.present == len(self._places))


class StagedLoad(_Staged):
    """See the module. The result is the number of leading blocks that are good and in the pool."""

    def __init__(
        self, cache: StagedCache, match: StagedMatch, block_ids: Sequence[int], first: int, timeout_s: float | None
    ) -> None:
        super().__init__(cache, block_ids, first)
        self._match: MatchLike | None = match.inner  # a load ends its match: each further piece needs a new one
        self._asked: TransferLike | None = None
        self._keys = match.keys
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._good = 0
        self.done()

    def result(self, timeout_s: float = 0.0) -> int:
        """The result; ask when it is done. Raises TierCacheError when not even the first piece came."""
        if not self._good:
            self._raise_error()
        return self._good

    def done(self) -> bool:
        if self._asked is not None:
            if not self._asked.done():
                return False
            self._match, self._asked = self._asked.result(0), None
            self._ended |= self._match is None
            if self._cancelled:
                self._give_up_match()
        return super().done()

    def cancel(self) -> None:
        super().cancel()
        self._give_up_match()

    def _begin(self) -> bool:
        if self._match is None:
            self._asked = self._cache.inner.ask_async(self._match_again, None)
            return True
        return super()._begin()

    def _match_again(self) -> MatchLike | None:
        """In the background."""
        try:
            return self._cache.inner.match(self._keys)
        except TierCacheError as error:
            self._error = error
            return None

    def _start(self, block_ids: list[int]) -> bool:
        inner, first = self._cache.inner, self._first + self._moved
        match, self._match = self._match, None
        assert match is not None, "a piece begins with a match"
        left_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
        if match.blocks < first + len(block_ids) or (left_s is not None and left_s <= 0):
            inner.release_async(match)
            return False
        try:
            self._piece = inner.load_async(match, self._places, first=first, timeout_s=left_s)
        except TierCacheError:
            inner.release_async(match)
            raise
        return True

    def _finish(self, piece: TransferLike) -> bool:
        good = min(int(piece.result(0)), len(self._places))
        self._cache.decode(self._places[:good], self._block_ids[self._moved : self._moved + good])
        self._good += good
        return good == len(self._places)

    def _give_up_match(self) -> None:
        if self._match is not None:
            self._cache.inner.release_async(self._match)
            self._match = None


class StagedCache:
    """A connector whose blocks have another layout than the pool's; the engine does not see the difference.

    The layers of a group are the leading ones of a block.
    """

    def __init__(self, inner: GroupLike, pool: KVPool, stage: torch.Tensor, layout: KVLayout) -> None:
        block_format = layout.block_format
        assert block_format is not None
        assert pool.layout.block_format is None, "only a raw pool is made smaller on its way"
        self.inner = inner
        self._pool = pool
        self._stage = stage
        self._format = block_format
        self._layers = layout.layers
        self._free = list(range(len(stage)))

    @classmethod
    def over(
        cls, connect: Callable[[torch.Tensor], GroupLike], pool: KVPool, layout: KVLayout, count: int
    ) -> StagedCache:
        """Connect a stage in place of the pool, one of `count` stages that share a memory limit."""
        blocks = max(_STAGE_BYTES // count // layout.block_bytes, _LEAST_STAGE_BLOCKS)
        stage = layout.empty(min(blocks, len(pool.blocks)), pool.device)
        return cls(connect(stage), pool, stage, layout)

    # --- for the engine (see GroupLike)

    @property
    def available(self) -> bool:
        return self.inner.available

    @property
    def wants_events(self) -> bool:
        return self.inner.wants_events

    def match(self, keys: bytes, *, namespaces: Sequence[NamespaceSpec] | None = None) -> StagedMatch:
        return StagedMatch(self.inner.match(keys, namespaces=namespaces), keys)

    def release(self, match: StagedMatch) -> None:
        self.inner.release(match.inner)

    def prefetch(self, keys: bytes, *, namespaces: Sequence[NamespaceSpec] | None = None) -> int:
        return self.inner.prefetch(keys, namespaces=namespaces)

    def ask_async(self, question: Callable[[], T], miss: T) -> TransferLike:
        return self.inner.ask_async(question, miss)

    def release_async(self, match: StagedMatch) -> None:
        self.inner.release_async(match.inner)

    def announce(self, models: Sequence[ModelCard]) -> None:
        self.inner.announce(models)

    def load_async(
        self, match: StagedMatch, block_ids: Sequence[int], *, first: int = 0, timeout_s: float | None = None
    ) -> StagedLoad:
        return StagedLoad(self, match, block_ids, first, timeout_s)

    def store_async(
        self,
        keys: bytes,
        block_ids: Sequence[int],
        *,
        first: int = 0,
        events: EventRun | None = None,
        hint: Hint | None = None,
    ) -> StagedStore:
        return StagedStore(self, keys, block_ids, first, events, hint)

    def close(self) -> None:
        self.inner.close()

    # --- for its transfers

    def room(self) -> int:
        """Number of free places in the stage."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take places in the stage for one piece."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, places: Sequence[int]) -> None:
        """Give places back; no copy may touch them any more."""
        self._free += places

    def encode(self, block_ids: Sequence[int], places: Sequence[int]) -> None:
        """Encode pool blocks into the stage. On a GPU it is ordered before work queued later."""
        blocks = self._pool.blocks[self._ids(block_ids), : self._layers]
        self._stage[self._ids(places)] = self._format.encode(blocks[:, :, 0], blocks[:, :, 1])

    def decode(self, places: Sequence[int], block_ids: Sequence[int]) -> None:
        """Decode blocks of the stage into the pool."""
        parts = self._format.decode(self._stage[self._ids(places)], self._pool.layout.dtype)
        for part, values in enumerate(parts):
            self._pool.blocks[self._ids(block_ids), : self._layers, part] = values.transpose(2, 3)

    def _ids(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._pool.device)

    def check_integrity(self) -> None:
        """Check that every place is free, with no transfer under way. Raises AssertionError."""
        assert sorted(self._free) == list(range(len(self._stage))), "the stage has lost a place"
