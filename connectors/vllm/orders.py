"""Orders of the scheduler's half to the workers with each step, and their reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import EventRun
from tiercache.protocol.namespaces import NamespaceSpec

from .compat import base


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
