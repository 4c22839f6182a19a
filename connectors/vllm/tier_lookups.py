"""Look-ups for the vLLM tier: what the cache has of each request, asked in the background for vLLM's scheduler thread.

    step 1      lookup of chunk 0, 1, ...    retry: one match for the whole request is on its way
    step n      lookup of chunk 0, 1, ...    hit, hit, ..., miss: vLLM has the hits loaded into its own memory
    step n + m  lookup of chunk 0, 1, ...    from its memory; what that has lost again meanwhile is a miss

An answer does not change within a step, where vLLM goes over the chunks of a request once or more. And it is given once
for each chunk of a request, or a memory too small for a prompt would load it again and again. Lookups are done in
order: while the daemon is slow with each, a request waits for its turn no longer than for one answer, and then bypasses
the cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from tiercache.connector.connector import Connector
from tiercache.connector.jobs import JobQueue, Transfer
from tiercache.connector.loads import Match
from tiercache.connectors.vllm.names import Names, keys_of
from tiercache.connectors.vllm.scheduler import SLOW_LOOKUP_S
from tiercache.copies.pool import Limit
from tiercache.protocol.messages import KEY_BYTES, MAX_KEYS
from tiercache.protocol.namespaces import NamespaceSpec
from vllm.v1.kv_offload.base import LookupResult, get_offload_block_hash, get_offload_group_idx

MAX_QUEUED_LOOKUPS = 1024
FIRST_GROUP = bytes(4)
"""The end of vLLM's keys of the first KV cache group. Keys of the other groups differ only in that end."""


class Place(NamedTuple):
    """A chunk: its KV cache group, and its number from the root on."""

    group: int
    number: int


class Chain:
    """The chunks of a request by key: vLLM's hashes, which grow, under a root. Keys are made in any thread."""

    __slots__ = ("_keys", "hashes", "root", "seen")

    def __init__(self) -> None:
        self.root = b""  # empty: it has none yet
        self.hashes: list[bytes] = []
        self.seen = 0  # hashes of all KV cache groups that have been looked at
        self._keys = b""  # as far as they have been needed

    def keys(self, end: int) -> bytes:
        """Keys of chunks `0 ..< end`. Cheap for those made before."""
        keys, have = self._keys, len(self._keys) // KEY_BYTES
        if have < end:
            # Concurrent callers make the same keys, and either result may be kept.
            keys = self._keys = keys + keys_of(self.root, self.hashes, 1, have, end)
        return keys[: end * KEY_BYTES]


class _Request:
    """A request of vLLM: its chunks as far as it has hashes for them, and its match."""

    __slots__ = ("answered", "chain", "closed", "finding", "match", "until_s")

    def __init__(self) -> None:
        self.chain = Chain()
        self.closed = False  # everything is a miss from here on
        self.until_s = 0.0  # deadline of the lookup in progress, if lookups are slow
        self.answered: set[bytes] = set()
        self.open()

    def open(self) -> None:
        """Reset to no lookup in progress."""
        self.finding: Transfer[Match] | None = None
        self.match: Match | None = None  # from the end of the step that found it, until it is loaded or released


class Lookups:
    """The requests of one engine.

    Args:
        connector: for matches; without a pool, because the loading side adopts them.
        specs: the namespace of each KV cache group; a match is what all of them have.
        names: the root of all chains; `names.root()` must not block.
        name_timeout_s: lookups wait for the model's name for so long from now.
    """

    def __init__(
        self, connector: Connector, specs: Sequence[NamespaceSpec], names: Names, name_timeout_s: float
    ) -> None:
        self._connector = connector
        self._specs = specs
        self._names = names
        self._named_by_s = time.monotonic() + name_timeout_s
        self._root = b""
        self._chunk_tokens = specs[0].block_size
        self._slow = False  # whether the last lookup was; set by their thread
        self._queue = JobQueue("tiercache-lookup", MAX_QUEUED_LOOKUPS)
        self._requests: dict[str, _Request] = {}
        self._finding: list[_Request] = []
        self._answering: list[_Request] = []  # in this step

    def add(self, request_id: str) -> None:
        """A new request. Only these are looked up or stored."""
        self._requests[request_id] = _Request()

    def lookup(self, key: bytes, context: Any) -> LookupResult:
        """Whether the cache has a chunk of a request; RETRY while that is not known."""
        state = self._requests.get(context.req_id)
        if state is None or state.closed or (key in state.answered and state.match is None):
            return LookupResult.MISS
        if state.match is None:
            if state.finding is None:
                self._ask(state, context)
            elif self._slow and time.monotonic() > state.until_s and not state.finding.done():
                state.closed = True
                self._let_go(state)
            return LookupResult.MISS if state.closed else LookupResult.RETRY
        if not self._answering or self._answering[-1] is not state:
            self._answering.append(state)
        state.answered.add(key)
        (group, number), blocks = place(key, context, self._chunk_tokens), state.match.blocks
        window = self._specs[group].window_blocks
        first = max(0, blocks - window) if window else 0
        return LookupResult.HIT if first <= number < blocks else LookupResult.MISS

    def _ask(self, state: _Request, context: Any) -> None:
        chain = self.chain(context)
        if chain is None:
            state.closed = time.monotonic() >= self._named_by_s
        elif not self._connector.available:
            state.closed = True
        else:
            state.closed = not chain.hashes  # made for another tier
            finding = Transfer(partial(self._find, chain, min(len(chain.hashes), MAX_KEYS)), Match, Match(), Limit())
            if self._queue.submit(finding):  # else the next step tries again
                state.finding = finding
                state.until_s = time.monotonic() + self._connector.client.request_timeout_s
                self._finding.append(state)

    def _named(self) -> bool:
        self._root = self._root or self._names.root()
        return bool(self._root)

    def _find(self, chain: Chain, end: int) -> Match:
        """In the thread of the queue."""
        keys, began_s = chain.keys(end), time.monotonic()
        match = self._connector.match(keys, namespaces=self._specs)
        self._slow = time.monotonic() - began_s > SLOW_LOOKUP_S
        return match

    def chain(self, context: Any) -> Chain | None:
        """The chunks of a request that vLLM has hashed so far; None where we have no keys for them."""
        state = self._requests.get(context.req_id)
        if state is None or not self._named():
            return None
        chain, known = state.chain, context._offload_key_positions  # in order within a group; the only list there is
        chain.root = self._root
        if len(known) > chain.seen:
            new = islice(known, chain.seen, None)
            chain.hashes += [get_offload_block_hash(key) for key in new if key.endswith(FIRST_GROUP)]
            chain.seen = len(known)
        return chain

    def take(self, request_id: str) -> Match | None:
        """What was found for a request; the caller loads it and releases it. None the second time."""
        state = self._requests.get(request_id)
        if state is None:
            return None
        match = state.match
        state.open()
        return match

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
            if state.finding is not None and not state.finding.done():
                self._finding.append(state)
            elif state.finding is not None:
                state.match = state.finding.result(0)

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

    def release(self, match: Match) -> None:
        """End a match in the background."""
        if match.blocks:
            self._queue.submit(Transfer(partial(self._connector.release, match), _nothing, None, Limit()))

    def _let_go(self, state: _Request) -> None:
        """Release the match, present or to come."""
        if state.match is not None:
            self.release(state.match)
        elif state.finding is not None:
            state.finding.cancel()
            release = partial(_release_found, self._connector, state.finding)  # in its turn, after the lookup
            self._queue.submit(Transfer(release, _nothing, None, Limit()))
        state.open()

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        for state in self._requests.values():
            assert state.match is None or state.finding is not None
            assert len(state.chain.hashes) <= state.chain.seen

    def close(self) -> None:
        """Blocks for seconds at most."""
        self._queue.close()
        self._connector.close()


def place(key: bytes, context: Any, chunk_tokens: int) -> Place:
    """The chunk of a request with this key of vLLM's. In any thread."""
    return Place(get_offload_group_idx(key), context._offload_key_positions[key] // chunk_tokens - 1)


def _nothing() -> None:
    """A release that is not made: the lease expires."""


def _release_found(connector: Connector, finding: Transfer[Match]) -> None:
    if finding.done():
        connector.release(finding.result(0))
