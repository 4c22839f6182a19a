"""Orders of the scheduler's half to the workers with each step, their reports, and what KV events say of the blocks.

KV events name blocks by vLLM's own hashes and tokens, as vLLM's own events do for blocks on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import EventRun, pack_indices
from tiercache.protocol.namespaces import NamespaceSpec

from .compat import base, kv_cache_interface, kv_cache_utils


class BlockRun(NamedTuple):
    """Blocks `first ..< first + len(block_ids)` of a chain, in one KV cache group."""

    first: int
    block_ids: list[int]


class Load(NamedTuple):
    """A load of blocks of a match, which the worker adopts by `ticket`, into each group's blocks."""

    request_id: str
    ticket: bytes
    runs: tuple[BlockRun, ...]


class Store(NamedTuple):
    """Blocks to be stored. `keys` begins with the parent of the first, unless that is the root.

    `events` is what KV events say of the blocks, if there are any.
    """

    job_id: int
    keys: bytes
    runs: tuple[BlockRun, ...]
    events: EventRun | None = None


class ChainHint(NamedTuple):
    """A hint about a chain, to be sent once the blocks ordered so far are stored."""

    keys: bytes
    hint: Hint


@dataclass
class Orders(base.KVConnectorMetadata):  # type: ignore[misc]
    """The orders of one step.

    Attributes:
        ready: stores whose blocks are computed.
        fresh: stores whose blocks this very step computes.
        flush: jobs whose blocks this step writes to: they end before it, or are void.
        cancel: requests that no longer want their load.
        hints: of requests that have ended.
        idle: the step computes nothing.
        begins: a request begins or goes on after it has waited.
        moves: by rank, how often its weights have changed, as known to the names in these orders.
        renamed: all names are given again with these orders, for the present weights.
        known: the scheduler's half has the forms of all ranks' blocks.
    """

    loads: list[Load] = field(default_factory=list)
    ready: list[Store] = field(default_factory=list)
    fresh: list[Store] = field(default_factory=list)
    flush: list[int] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    hints: list[ChainHint] = field(default_factory=list)
    idle: bool = False
    begins: bool = False
    moves: dict[int, int] = field(default_factory=dict)
    renamed: bool = False
    known: bool = True


@dataclass
class RankForm(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The form of one rank's blocks, a namespace for each KV cache group, or why it has none.

    `absence` is why it has no daemon at its start: that may change.
    """

    specs: list[NamespaceSpec]
    problem: str = ""
    absence: str = ""


@dataclass
class WorkerReport(base.KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Which store jobs have ended, at how many ranks, and which of them left blocks out; how long loads took.

    `moves`: by rank, how often its weights have changed, if the orders do not know it yet.
    `forms`: by rank, the form of its blocks, if no handshake could tell it.
    """

    ended: dict[int, int] = field(default_factory=dict)
    incomplete: set[int] = field(default_factory=set)
    load_seconds: dict[str, float] = field(default_factory=dict)
    moves: dict[int, int] = field(default_factory=dict)
    forms: dict[int, RankForm] = field(default_factory=dict)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """This and another rank's report as one."""
        jobs = self.ended.keys() | other.ended.keys()
        ended = {job: self.ended.get(job, 0) + other.ended.get(job, 0) for job in jobs}
        loads = self.load_seconds.keys() | other.load_seconds.keys()
        longest = {name: max(self.load_seconds.get(name, 0.0), other.load_seconds.get(name, 0.0)) for name in loads}
        moves, forms = {**self.moves, **other.moves}, {**self.forms, **other.forms}
        return WorkerReport(ended, self.incomplete | other.incomplete, longest, moves, forms)


# --- KV events ---------------------------------------------------------------------------------------


class CacheGroup(NamedTuple):
    """A KV cache group, as events name it."""

    group_id: int
    kind: str
    window: int | None


def event_groups(kv_cache_config: Any) -> list[CacheGroup]:
    """The groups of an engine, in order."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kind, window = kv_cache_interface.get_kv_cache_spec_kind, kv_cache_interface.get_kv_cache_spec_sliding_window
    return [CacheGroup(group_id, kind(spec).value, window(spec)) for group_id, spec in enumerate(specs)]


def name_blocks(request: Any, first: int, end: int, per_block: int, block_size: int) -> EventRun:
    """Blocks `first ..< end` of a request, each of `per_block` hashes of vLLM's."""
    external = kv_cache_utils.maybe_convert_block_hash
    places = range((first + 1) * per_block - 1, end * per_block, per_block)
    adapter, extra = request.lora_request, None
    if adapter is not None or request.mm_features or request.cache_salt or request.prompt_embeds is not None:
        starts = range(first * block_size, end * block_size, block_size)
        made = [kv_cache_utils.generate_block_hash_extra_keys(request, at, at + block_size, 0)[0] for at in starts]
        extra = kv_cache_utils.to_event_extra_keys(made)
    return EventRun(
        hashes=[external(request.block_hashes[place]) for place in places],
        parent=external(request.block_hashes[first * per_block - 1]) if first else None,
        tokens=pack_indices(list(request.all_token_ids[first * block_size : end * block_size])),
        lora_id=adapter.adapter_id if adapter is not None else None,
        lora_name=adapter.name if adapter is not None else None,
        extra_keys=extra,
    )


def of_group(events: EventRun, group: CacheGroup, first: int, count: int) -> EventRun:
    """The part of an event run for blocks `first ..< first + count` in one KV cache group."""
    part = events.part(first, count)
    return msgspec.structs.replace(part, group=group.group_id, kind=group.kind, window=group.window)
