"""A separate cache for each group of layers, used together.

    match   one request: the longest cut for which all namespaces have the blocks needed, under one lease;
            then one for each group, made under that lease
    load    each group by its own match
    store   each group for itself: lost blocks make a match shorter, never wrong

With one group it is that group's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from tiercache.engine.cache import EachMatch, GroupLike, MatchLike, Part, TransferLike
from tiercache.errors import TierCacheError
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import KEY_BYTES, EventRun, ModelCard
from tiercache.protocol.namespaces import NamespaceSpec

T = TypeVar("T")


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
        """True if no copy runs or will run."""
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

    def match_each(self, match: MatchLike, keys: bytes) -> EachMatch | None:
        """Each group's own match of `keys`, in place of the `match` of all groups, which ends here.

        None if a group has lost a block meanwhile. Blocks for one exchange with the daemon for each of several groups.
        """
        if len(self._caches) == 1:
            return EachMatch(match.blocks, match.below_blocks, match.shared_blocks, [match])
        own: list[MatchLike] = []
        whole = False
        try:
            for cache in self._caches:
                own.append(found := cache.match(keys))
                if found.blocks * KEY_BYTES != len(keys):
                    return None
            whole = True
        finally:
            self.release(match)
            for cache, found in zip(self._caches, [] if whole else own, strict=False):
                cache.release(found)
        return EachMatch(match.blocks, match.below_blocks, match.shared_blocks, [*own])

    def release(self, match: MatchLike) -> None:
        """End a match of all groups. Blocks for one exchange with the daemon."""
        self._caches[0].release(match)

    def release_async(self, match: EachMatch) -> None:
        """End the matches that no load has taken, in the background."""
        for cache, own in zip(self._caches, match.matches, strict=True):
            if own is not None:
                cache.release_async(own)

    def ask_async(self, question: Callable[[], T], miss: T) -> TransferLike:
        return self._caches[0].ask_async(question, miss)

    def prefetch(self, keys: bytes) -> int:
        """Promote what `match` would find. Blocks for one exchange with the daemon."""
        return self._caches[0].prefetch(keys, namespaces=self._namespaces if len(self._caches) > 1 else None)

    def announce(self, models: Sequence[ModelCard]) -> None:
        self._caches[0].announce(models)

    def load_async(self, match: EachMatch, parts: Sequence[Part], *, timeout_s: float) -> GroupLoad:
        """Load a part of each group, and take its match; a part without blocks is skipped. Never blocks."""
        transfers: list[TransferLike | None] = [None] * len(parts)
        for group, (first, block_ids) in enumerate(parts):
            if not block_ids:
                continue
            try:
                own = match.matches[group]
                transfers[group] = self._caches[group].load_async(own, block_ids, first=first, timeout_s=timeout_s)
                match.matches[group] = None
            except TierCacheError as error:
                if not any(transfers):
                    raise
                return GroupLoad(transfers, error)  # copies that have begun continue, and the transfer waits for them
        return GroupLoad(transfers)

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
