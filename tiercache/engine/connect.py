"""Connects an engine to its cache: one connector, a sibling for each further group of layers, and the blocks' names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

import tiercache
from tiercache.engine.cache import CacheLike, EachMatch, GroupLike, MatchLike, Part, TransferLike
from tiercache.engine.kv_pool import RAW, KVLayout, KVPool, LayerGroup
from tiercache.engine.model import ModelShape, can_pack, choose_device, read_shape, weight_files
from tiercache.engine.settings import EngineSettings
from tiercache.engine.tier_format import StagedCache
from tiercache.errors import ConfigError, TierCacheError
from tiercache.protocol.hints import Hint
from tiercache.protocol.keys import content_id, fingerprint_files, salted_root
from tiercache.protocol.messages import KEY_BYTES, EventRun, ModelCard
from tiercache.protocol.namespaces import NamespaceSpec

# --- one cache for each group of layers --------------------------------------------------------------
#
#     match   one request: the longest cut for which all namespaces have the blocks needed, under one lease;
#             then one for each group, made under that lease
#     load    each group by its own match
#     store   each group for itself: lost blocks make a match shorter, never wrong
#
# With one group it is that group's cache.

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


# --- connecting --------------------------------------------------------------------------------------

Connect = Callable[[NamespaceSpec, torch.Tensor], CacheLike]
"""Makes a connector for the blocks of a namespace in a pool `[block, ...]`, each contiguous (see `KVLayout.empty`)."""


def connect_to(address: str | Path | None = None, *, name: str = "engine", **options: Any) -> Connect:
    """Connects an engine to the daemon at `address` (by default the daemon's default address).

    `options` are those of `tiercache.connect`. With `required`, the engine raises DaemonUnavailable when no daemon
    answers; else it starts without its cache and connects when the daemon comes.
    """

    def connect(namespace: NamespaceSpec, pool: torch.Tensor) -> CacheLike:
        blocks = tiercache.Pool.from_blocks(pool)
        return tiercache.connect(address, namespace=namespace, pool=blocks, name=name, **options)

    return connect


def connect_groups(
    connect: Connect, pool: KVPool, namespaces: Sequence[NamespaceSpec], layouts: Sequence[KVLayout], *, staged: bool
) -> GroupedCache:
    """The cache of each group of layers; with `staged` its blocks have another layout than in the pool.

    `layouts` are the layouts in the cache. Raises what `connect` does.
    """
    first: CacheLike | None = None

    def reach(namespace: NamespaceSpec, blocks: torch.Tensor) -> GroupLike:
        nonlocal first
        if first is not None:
            return first.sibling(namespace, tiercache.Pool.from_blocks(blocks))
        first = connect(namespace, blocks)
        return first

    caches: list[GroupLike] = []
    for namespace, layout in zip(namespaces, layouts, strict=True):
        if staged:
            caches.append(StagedCache.over(partial(reach, namespace), pool, layout, len(layouts)))
        else:
            caches.append(reach(namespace, pool.blocks[:, : layout.layers]))
    return GroupedCache(caches, namespaces)


# --- names -------------------------------------------------------------------------------------------

ENGINE_NAME = "tiercache/1"
BLOCK_LAYOUT = "layer,2,slot,kv_head,head_dim"
RECORD_LAYOUT = "layer,record"


def describe_model(
    model_dir: str | Path, settings: EngineSettings | None = None, *, epoch: int = 0
) -> tuple[list[NamespaceSpec], bytes]:
    """The namespaces of a model's blocks and the root key of its chains: `identify_model`, and the salt."""
    settings = settings or EngineSettings()
    namespaces, content = identify_model(model_dir, settings, epoch=epoch)
    return namespaces, salted_root(content, settings.salt)


def identify_model(
    model_dir: str | Path, settings: EngineSettings, *, epoch: int = 0
) -> tuple[list[NamespaceSpec], bytes]:
    """The namespace of each group of layers (most models have one) and the `content_id` of what computes the blocks.

    Reads config.json and every byte of the weights, at the speed of the disk. With `exact`, torch's version and
    the device are part of the namespaces. Raises ModelRefused and ConfigError.
    """
    shape = read_shape(model_dir, settings)
    groups = shape.groups(settings).groups
    namespaces = [_namespace(shape, group, len(groups) > 1, settings) for group in groups]
    content = fingerprint_files([*weight_files(model_dir), Path(model_dir) / "config.json"])
    # Exact reuse needs the same split of the prefill, which depends on the chunk size.
    split = f"{settings.chunk_size}" if settings.exact else "any"
    parts = [("split", split)]
    if settings.attention_window:
        # A token's K and V in all layers but the first depend on what it sees.
        parts.append(("attention", f"{settings.attention_window} after {settings.sink_tokens}"))
    return namespaces, content_id(content, epoch=epoch, extra=parts)


def file_states(model_dir: str | Path) -> list[tuple[str, int, int, int]]:
    """A value that changes when one of a model's files is replaced or written to."""
    files = [*weight_files(model_dir), Path(model_dir) / "config.json"]
    states = [(file.name, file.stat()) for file in map(Path, files)]
    return [(name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states]


def _namespace(shape: ModelShape, group: LayerGroup, mixed: bool, settings: EngineSettings) -> NamespaceSpec:
    """The namespace of a group's blocks. Places without a layer are not stored."""
    layout = tier_layout(shape, group, settings)
    name = "window" if group.window.size else "full"
    namespace = NamespaceSpec(
        engine=ENGINE_NAME,
        layout=BLOCK_LAYOUT if layout.format == RAW else RECORD_LAYOUT,
        dtype=str(shape.dtype).removeprefix("torch."),
        block_size=settings.block_size,
        block_bytes=layout.block_bytes,
        layers=layout.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        group=f"{name}: layers {' '.join(map(str, group.layers))}" if mixed else name,
        quantization="none" if layout.format == RAW else layout.format,
        window_blocks=group.window.blocks,
        extra=_arithmetic(settings, shape.dtype) if settings.exact else {},
    )
    if problem := namespace.problem():
        raise ConfigError(f"{problem}; change block_size")
    return namespace


def tier_layout(shape: ModelShape, group: LayerGroup, settings: EngineSettings) -> KVLayout:
    """The layout of a group's blocks in the cache's tiers. Raises ConfigError."""
    name = settings.kv_cache_dtype if settings.tier_dtype == "auto" else settings.tier_dtype
    return shape.kv_layout(settings.block_size, name, len(group.layers))


def _arithmetic(settings: EngineSettings, dtype: torch.dtype) -> dict[str, str]:
    """What determines the last bits of a result: blocks computed with anything else may differ from ours."""
    device = choose_device(settings.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    linear = "packed" if can_pack(dtype, device) else "plain"
    return {"torch": str(torch.__version__), "device": f"{device.type} {name}", "linear": linear}
