"""A separate cache for each group of layers, used together.

    match   one request: the longest cut for which all namespaces have the blocks needed, under one lease
    load    each group by its own match, made under that lease
    store   each group for itself: lost blocks make a match shorter, never wrong

With one group it is that group's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tiercache.engine.cache import GroupLike, MatchLike, Part, TransferLike
from tiercache.errors import TierCacheError
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import KEY_BYTES, EventRun, ModelCard
from tiercache.protocol.namespaces import NamespaceSpec


class GroupLoad:
    """A load of several groups; the result has the good blocks of each. See TransferLike.

    `transfers` has None for a group of which nothing is loaded; `error` is why the whole load fails.
    """

    def __init__(self, transfers: Sequence[TransferLike | None], error: TierCacheError | None = None) -> None:
        self._transfers = transfers
        self._error = error

    @property
    def _under_way(self) -> list[TransferLike]:
        return [transfer for transfer in self._transfers if transfer is not None]

    @property
    def began_s(self) -> float:
        return min((transfer.began_s for transfer in self._under_way if transfer.began_s), default=0.0)

    @property
    def ended_s(self) -> float:
        return max((transfer.ended_s for transfer in self._under_way), default=0.0)

    def done(self) -> bool:
        """Whether no copy runs or will run."""
        # Ask all of them, since that is how a staged transfer takes its next step.
        return sum(not transfer.done() for transfer in self._under_way) == 0

    def result(self, timeout_s: float = 0.0) -> list[int]:
        """The leading blocks of each group that are proven good. Raises TierCacheError if a group fails."""
        if self._error is not None:
            raise self._error
        return [0 if transfer is None else int(transfer.result(timeout_s)) for transfer in self._transfers]

    def cancel(self) -> None:
        for transfer in self._under_way:
            transfer.cancel()


class GroupedCache:
    """See the module. `caches` are those of `namespaces`, one for each group, in their order."""

    def __init__(self, caches: Sequence[GroupLike], namespaces: Sequence[NamespaceSpec]) -> None:
        self._caches = list(caches)
        self._namespaces = list(namespaces)

    @property
    def available(self) -> bool:
        return self._caches[0].available

    @property
    def wants_events(self) -> bool:
        return self._caches[0].wants_events

    def match(self, keys: bytes) -> MatchLike:
        """The prefix that all groups have. Blocks for one exchange with the daemon."""
        return self._caches[0].match(keys, namespaces=self._namespaces if len(self._caches) > 1 else None)

    def release(self, match: Any) -> None:
        self._caches[0].release(match)

    def prefetch(self, keys: bytes) -> int:
        """Promote what `match` would find. Blocks for one exchange with the daemon."""
        return self._caches[0].prefetch(keys, namespaces=self._namespaces if len(self._caches) > 1 else None)

    def announce(self, models: Sequence[ModelCard]) -> None:
        self._caches[0].announce(models)

    def load_async(self, match: Any, keys: bytes, parts: Sequence[Part], *, timeout_s: float) -> GroupLoad:
        """Load a part of each group from a match with these `keys`; a part without blocks is skipped.

        With several groups it blocks for one exchange with the daemon for each. Ends the match.
        """
        if len(self._caches) == 1:
            [(first, block_ids)] = parts
            return GroupLoad([self._caches[0].load_async(match, block_ids, first=first, timeout_s=timeout_s)])
        transfers: list[TransferLike | None] = [None] * len(parts)
        error = None
        for group, (first, block_ids) in enumerate(parts):
            try:
                if block_ids:
                    transfers[group] = self._load(self._caches[group], keys, first, block_ids, timeout_s)
            except TierCacheError as failed:
                error = failed  # copies that have begun continue, and the transfer waits for them
                break
        self.release(match)
        return GroupLoad(transfers, error)

    def _load(
        self, cache: GroupLike, keys: bytes, first: int, block_ids: list[int], timeout_s: float
    ) -> TransferLike | None:
        match = cache.match(keys)
        try:
            if match.blocks * KEY_BYTES == len(keys):
                return cache.load_async(match, block_ids, first=first, timeout_s=timeout_s)
        except TierCacheError:
            cache.release(match)
            raise
        cache.release(match)  # flushed since the match
        return None

    def store_async(
        self,
        group: int,
        keys: bytes,
        block_ids: Sequence[int],
        *,
        first: int = 0,
        events: EventRun | None = None,
        hint: Hint | None = None,
    ) -> TransferLike:
        if events is not None and len(self._caches) > 1:
            # The same keys name the blocks of every group; listeners tell the groups apart by this.
            blocks, size = self._namespaces[group].window_blocks, self._namespaces[group].block_size
            kind = "sliding_window" if blocks else "full_attention"
            events = msgspec.structs.replace(events, group=group, kind=kind, window=blocks * size or None)
        return self._caches[group].store_async(keys, block_ids, first=first, events=events, hint=hint)

    def close(self) -> None:
        """Close the first connector; the others are its siblings and end with it."""
        self._caches[0].close()
