"""The parts of `vllm_tier`: lookups, and jobs.

A lookup answers vLLM about each chunk of a request, from one match for all of them:

    step 1      lookup of chunk 0, 1, ...    retry: one match for the whole request is on its way
    step n      lookup of chunk 0, 1, ...    hit, hit, ..., miss: vLLM has the hits loaded into its own memory
    step n + m  lookup of chunk 0, 1, ...    from its memory; what that has lost again meanwhile is a miss

An answer does not change within a step, where vLLM goes over the chunks of a request once or more. And it is given once
for each chunk of a request, or a memory too small for a prompt would load it again and again. How the daemon is asked,
and how long a request waits for that, is in `lookups.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from tiercache.connector.connector import Connector
from tiercache.connector.jobs import Transfer
from tiercache.connector.stores import StoreResult
from tiercache.protocol.messages import KEY_BYTES, MAX_KEYS
from tiercache.protocol.namespaces import NamespaceSpec
from vllm.v1.kv_offload.base import LookupResult, get_offload_block_hash, get_offload_group_idx, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult

from .groups import GroupPart
from .lookups import Lookup, MatchLookups
from .names import Names, keys_of

MAX_LOOKUPS = 1024
"""In progress at once; requests beyond them are looked up in later steps."""
FIRST_GROUP = bytes(4)
"""The end of vLLM's keys of the first KV cache group. Keys of the other groups differ only in that end."""


class ChunkPlace(NamedTuple):
    """A chunk: the number of its part, and its position in the chain; 0 is the first."""

    part: int
    position: int


class ChunkPlaces:
    """Where vLLM's chunks belong. Thread-safe.

    Args:
        parts: of the KV cache groups, in chunks.
        chunk_tokens: tokens in a chunk of the cache.
    """

    def __init__(self, parts: Sequence[GroupPart], chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._every = {part.group: part.every for part in parts}
        self._mixed = max(self._every.values()) > 1
        self._numbers = {(part.group, part.offset): number for number, part in enumerate(parts)}

    def of(self, key: bytes, context: Any) -> ChunkPlace | None:
        """The place of a request's chunk with this key of vLLM's; None for chunks that are not kept."""
        group, end = get_offload_group_idx(key), context._offload_key_positions[key]
        every = self._every.get(group, 1)
        chunk, rest = divmod(end * every, self.chunk_tokens)
        position, offset = divmod(chunk - 1, every)
        number = self._numbers.get((group, offset))
        return None if rest or number is None else ChunkPlace(number, position)

    def is_split(self, key: bytes) -> bool:
        """True if several chunks of the group of this key of vLLM's make one of the cache."""
        return self._mixed and self._every.get(get_offload_group_idx(key), 1) > 1


class Chain:
    """The chunks of a request by key: vLLM's hashes, which grow, under a root. Keys are made in any thread."""

    __slots__ = ("_keys", "early", "hashes", "pieces", "root", "seen")
    root: bytes  # set when it is known

    def __init__(self) -> None:
        self.hashes: list[bytes] = []
        self.pieces: dict[ChunkPlace, bytes] = {}  # vLLM's keys where several chunks make one of the cache
        self.early: set[ChunkPlace] = set()  # stored by vLLM before there was a key; for the thread that stores
        self.seen = 0  # hashes of all KV cache groups that have been looked at
        self._keys = b""  # as far as they have been needed

    def keys(self, end: int) -> bytes:
        """Keys of chunks `0 ..< end`. Cheap for those made before."""
        keys, have = self._keys, len(self._keys) // KEY_BYTES
        if have < end:
            # Concurrent callers make the same keys, and either result may be kept.
            keys = self._keys = keys + keys_of(self.root, self.hashes, 1, have, end)
        return keys[: end * KEY_BYTES]

    def vllm_key(self, place: ChunkPlace, part: GroupPart) -> bytes | None:
        """vLLM's key of a chunk; None if it has none yet."""
        if part.every > 1:
            return self.pieces.get(place)
        return bytes(make_offload_key(self.hashes[place.position], part.group))


class _TierRequest:
    """A request of vLLM: its chunks as far as it has hashes for them, and its lookup."""

    __slots__ = ("answered", "chain", "closed", "known", "lookup")

    def __init__(self) -> None:
        self.chain = Chain()
        self.closed = False  # everything is a miss from here on
        self.answered: set[bytes] = set()
        self.lookup: Lookup | None = None
        self.known = False  # vLLM may be told of its match: from the end of a step on, until it is loaded or dropped


class TierLookups:
    """The requests of one engine.

    Args:
        connector: for matches; without a pool, because the loading side adopts them.
        specs: the namespace of each part of the KV cache groups; a match is what all of them have.
        names: the root of all chains; `names.root()` must not block.
        name_timeout_s: time from now that lookups wait for the model's name.
        places: of vLLM's chunks; without, all are of one part.
        longest: the most chunks of a request that vLLM can use.
    """

    def __init__(
        self,
        connector: Connector,
        specs: Sequence[NamespaceSpec],
        names: Names,
        name_timeout_s: float,
        places: ChunkPlaces | None = None,
        longest: Callable[[str], int] = lambda request_id: MAX_KEYS,
    ) -> None:
        self.connector = connector
        self._specs = specs
        self._names = names
        self._named_by_s = time.monotonic() + name_timeout_s
        self._root = b""
        self._places = places or ChunkPlaces([GroupPart(0, specs[0].block_size)], specs[0].block_size)
        self._longest = longest
        self._lookups = MatchLookups(connector, specs)
        self._requests: dict[str, _TierRequest] = {}
        self._finding: list[_TierRequest] = []
        self._answering: list[_TierRequest] = []  # in this step

    def add(self, request_id: str) -> None:
        """A new request. Only these are looked up or stored."""
        self._requests[request_id] = _TierRequest()

    def lookup(self, key: bytes, context: Any) -> LookupResult:
        """HIT if the cache has a chunk of a request, else MISS; RETRY while that is not known."""
        state = self._requests.get(context.req_id)
        if state is None or state.closed or (key in state.answered and not state.known):
            return LookupResult.MISS
        lookup = state.lookup
        if lookup is None or not state.known:
            if lookup is None:
                self._ask(state, context)
            elif self._lookups.overdue(lookup) and not lookup.done:
                state.closed = True
                self._let_go(state)
            return LookupResult.MISS if state.closed else LookupResult.RETRY
        if not self._answering or self._answering[-1] is not state:
            self._answering.append(state)
        state.answered.add(key)
        place, blocks = self._places.of(key, context), lookup.match.blocks
        if place is None:
            return LookupResult.MISS
        window = self._specs[place.part].window_blocks
        first = max(0, blocks - window) if window else 0
        return LookupResult.HIT if first <= place.position < blocks else LookupResult.MISS

    def _ask(self, state: _TierRequest, context: Any) -> None:
        chain = self.chain(context)
        if chain is None:
            state.closed = time.monotonic() >= self._named_by_s
        elif not chain.hashes or not self.connector.available:  # without hashes it was made for another tier
            state.closed = True
        elif len(self._finding) < MAX_LOOKUPS:
            end = min(len(chain.hashes), MAX_KEYS, self._longest(context.req_id))
            state.lookup = self._lookups.ask(lambda: (chain.root, chain.keys(end)))
            self._lookups.begin()
            self._finding.append(state)

    def _named(self) -> bool:
        self._root = self._root or self._names.root()
        return bool(self._root)

    def chain(self, context: Any) -> Chain | None:
        """The chunks of a request that vLLM has hashed so far; None where we have no keys for them."""
        state = self._requests.get(context.req_id)
        if state is None or not self._named():
            return None
        chain, known = state.chain, context._offload_key_positions  # in order within a group; the only list there is
        chain.root = self._root
        if len(known) > chain.seen:
            size, hashes = self._places.chunk_tokens, chain.hashes
            for key in islice(known, chain.seen, None):
                if key.endswith(FIRST_GROUP) and known[key] == (len(hashes) + 1) * size:
                    hashes.append(get_offload_block_hash(key))
                if self._places.is_split(key) and (place := self._places.of(key, context)) is not None:
                    chain.pieces[place] = key
            chain.seen = len(known)
        return chain

    def take(self, request_id: str) -> Lookup | None:
        """What was found for a request; the caller loads it and drops it. None the second time."""
        state = self._requests.get(request_id)
        if state is None or not state.known:
            return None
        lookup, state.lookup, state.known = state.lookup, None, False
        return lookup

    def ask_again(self, request_id: str, keys: Iterable[bytes]) -> None:
        """These chunks have been answered, but not loaded."""
        if request_id in self._requests:
            self._requests[request_id].answered.difference_update(keys)

    def end_step(self, preempted: Iterable[str]) -> None:
        """All lookups and loads of a step have been made. Preempted requests may ask once more."""
        for state in self._answering:
            self._let_go(state)
        self._answering.clear()
        for request_id in preempted:
            if request_id in self._requests:
                self._requests[request_id].answered.clear()
        waiting, self._finding = self._finding, []
        for state in waiting:
            if state.lookup is not None and not state.lookup.done:
                self._finding.append(state)
            elif state.lookup is not None:
                state.known = True

    def remove(self, request_id: str) -> None:
        """A request has ended."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._let_go(state)

    def forget(self) -> None:
        """The weights may have changed: from here on chunks have other keys, and these requests no cache."""
        for request_id in list(self._requests):
            self.remove(request_id)
        self._answering.clear()
        self._finding.clear()
        self._names.new_epoch()
        self._root = b""

    def drop(self, lookup: Lookup) -> None:
        """End a match in the background, present or to come."""
        self._lookups.drop(lookup)
        self._lookups.begin()

    def _let_go(self, state: _TierRequest) -> None:
        if state.lookup is not None:
            self.drop(state.lookup)
        state.lookup, state.known = None, False

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        for state in self._requests.values():
            assert not state.known or (state.lookup is not None and state.lookup.done)
            assert len(state.chain.hashes) <= state.chain.seen

    def close(self) -> None:
        """Blocks for seconds at most."""
        self._lookups.close()


# --- jobs: their transfers, and the results reported to vLLM -----------------------------------------


class ChunkRun(NamedTuple):
    """Consecutive chunks of a job: the position of the first in its chain, and rows and keys of all."""

    part: int
    first: int
    rows: list[int]
    keys: list[bytes]

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + len(self.rows)


def runs_of(places: Iterable[ChunkPlace | None], rows: Iterable[int], keys: Iterable[bytes]) -> list[ChunkRun]:
    """The chunks of a job by part, in the order of their chains; those without a place are left out."""
    runs: list[ChunkRun] = []
    placed = ((place, row, key) for place, row, key in zip(places, rows, keys, strict=True) if place is not None)
    for (part, position), row, key in sorted(placed):
        if not runs or runs[-1].part != part or runs[-1].end != position:
            runs.append(ChunkRun(part, position, [], []))
        runs[-1].rows.append(row)
        runs[-1].keys.append(key)
    return runs


class Orphan(NamedTuple):
    """Chunks `first ..< end` of a chain in one part, of which the last were stored and found no parent."""

    part: int
    chain: Chain
    end: int
    first: int = 0


class LoadJob:
    """A load; the background thread makes its `parts` until it has `begun`."""

    def __init__(self, request_id: str, lookup: Lookup, chunks: int) -> None:
        self.request_id = request_id
        self.lookup = lookup
        self.chunks = chunks
        self.parts: list[tuple[ChunkRun, Transfer[int]]] = []
        self.left_out: list[bytes] = []  # keys of chunks that are not loaded after all
        self.begun = False

    def result(self, job_id: int) -> JobResult:
        """For vLLM, when it has ended."""
        good = [key for run, transfer in self.parts for key in run.keys[: transfer.result(0)]]
        whole = len(good) == self.chunks
        return JobResult(job_id, whole, None if whole else good, _seconds(self.parts))


class StoreJob:
    """A store; the background thread makes its `parts` until it has `begun`."""

    def __init__(self) -> None:
        self.parts: list[tuple[Orphan | None, Transfer[StoreResult]]] = []
        self.begun = False

    def result(self, job_id: int) -> JobResult:
        """For vLLM, when it has ended."""
        dropped = any(transfer.result(0).dropped for _, transfer in self.parts)
        return JobResult(job_id, not dropped and bool(self.parts), None, _seconds(self.parts))

    def orphans(self) -> Iterator[Orphan]:
        """Chunks that have found no parent, once it has ended."""
        for orphan, transfer in self.parts:
            if orphan is not None and transfer.result(0).parent_missing:
                yield orphan


def has_ended(job: LoadJob | StoreJob) -> bool:
    """True if its last copy has ended."""
    return job.begun and all(transfer.done() for _, transfer in job.parts)


def _seconds(parts: Iterable[tuple[Any, Transfer[Any]]]) -> float:
    """Total time of transfers that have ended."""
    times = [(transfer.began_s, transfer.ended_s) for _, transfer in parts if transfer.ended_s]
    return max(end for _, end in times) - min(begin for begin, _ in times) if times else 0.0
