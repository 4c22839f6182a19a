"""What the cache has of each request, asked in the background; used by vLLM's scheduler thread.

    step 1      lookup of chunk 0, 1, ...    retry: one match for the whole request is on its way
    step n      lookup of chunk 0, 1, ...    hit, hit, ..., miss: vLLM has the hits loaded into its own memory
    step n + m  lookup of chunk 0, 1, ...    from its memory; what that has lost again meanwhile is a miss

An answer does not change within a step, where vLLM goes over the chunks of a request once or more. And it is
given once for each chunk of a request, or a memory that is too small for a prompt would never stop to load it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import LookupResult, get_offload_block_hash, get_offload_group_idx

from tiercache.connector import Connector
from tiercache.connectors.vllm_names import Names, keys_of
from tiercache.jobs import JobQueue, Transfer
from tiercache.layout import NamespaceSpec
from tiercache.loading import Match
from tiercache.messages import KEY_BYTES, MAX_KEYS
from tiercache.transfer import Limit

MAX_QUEUED_LOOKUPS = 1024
FIRST_GROUP = bytes(4)
"""How vLLM's keys of the first KV cache group end. Those of the others differ in nothing but that end."""


class _Found(NamedTuple):
    keys: bytes = b""
    match: Match = Match()


class _Request:
    """A request of vLLM: its chunks as far as it has hashes for them, and what was found of them."""

    __slots__ = ("answered", "closed", "finding", "hashes", "keys", "match", "seen")

    def __init__(self) -> None:
        self.seen = 0  # hashes of all KV cache groups that have been looked at
        self.hashes: list[bytes] = []
        self.keys = bytearray()  # of the first chunks, as far as they have been needed
        self.closed = False  # everything is a miss from here on
        self.answered: set[bytes] = set()
        self.open()

    def open(self) -> None:
        """Nothing is being asked."""
        self.finding: Transfer[_Found] | None = None
        self.match: Match | None = None  # from the end of the step that found it, until it is loaded or released


class Lookups:
    """The requests of one engine.

    Args:
        connector: for matches; without a pool, because whoever loads adopts them.
        specs: the namespace of each KV cache group; a match is what all of them have.
        names: the root of all chains; `names.root()` must not block.
        name_timeout_s: lookups wait so long for the model's name after now.
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
            return LookupResult.MISS if state.closed else LookupResult.RETRY
        if not self._answering or self._answering[-1] is not state:
            self._answering.append(state)
        state.answered.add(key)
        (group, number), blocks = self.place(key, context), state.match.blocks
        window = self._specs[group].window_blocks
        first = max(0, blocks - window) if window else 0
        return LookupResult.HIT if first <= number < blocks else LookupResult.MISS

    def place(self, key: bytes, context: Any) -> tuple[int, int]:
        """The KV cache group of a chunk of this request, and its number from the root on."""
        return get_offload_group_idx(key), context._offload_key_positions[key] // self._chunk_tokens - 1

    def _ask(self, state: _Request, context: Any) -> None:
        if not self._named():
            state.closed = time.monotonic() >= self._named_by_s
        elif not self._connector.available:
            state.closed = True
        else:
            hashes = self.hashes(context)[:MAX_KEYS]
            state.closed = not hashes  # of another tier's making
            finding = Transfer(partial(self._find, self._root, hashes), _Found, _Found(), Limit())
            if self._queue.submit(finding):  # else the next step tries again
                state.finding = finding
                self._finding.append(state)

    def _named(self) -> bool:
        self._root = self._root or self._names.root()
        return bool(self._root)

    def _find(self, root: bytes, hashes: list[bytes]) -> _Found:
        """In the thread of the queue."""
        keys = keys_of(root, hashes, 1, 0, len(hashes))
        return _Found(keys, self._connector.match(keys, namespaces=self._specs))

    def hashes(self, context: Any) -> list[bytes]:
        """The hashes of a request's chunks from the root on. Cheap for those that were there before."""
        state = self._requests[context.req_id]
        known = context._offload_key_positions  # in order within a group; there is no other way to list them
        if len(known) > state.seen:
            new = islice(known, state.seen, None)
            state.hashes += [get_offload_block_hash(key) for key in new if key.endswith(FIRST_GROUP)]
            state.seen = len(known)
        return state.hashes

    def may_store(self, request_id: str) -> bool:
        """Whether the chunks of a request have names."""
        return request_id in self._requests and self._named()

    def keys(self, context: Any, end: int) -> bytes:
        """The keys of a request's chunks `0 ..< end`. Cheap for those that there were before."""
        state = self._requests[context.req_id]
        hashes, have = self.hashes(context), len(state.keys) // KEY_BYTES
        if have < end:
            state.keys += keys_of(self._root, hashes, 1, have, end)
        return bytes(state.keys[: end * KEY_BYTES])

    def take(self, request_id: str) -> Match | None:
        """What was found for a request, for whoever loads it and releases it; None the second time."""
        state = self._requests.get(request_id)
        if state is None:
            return None
        match = state.match
        state.open()
        return match

    def ask_again(self, request_id: str, keys: Iterable[bytes]) -> None:
        """These chunks have been answered, but not loaded."""
        self._requests[request_id].answered.difference_update(keys)

    def end_step(self, preempted: Iterable[str]) -> None:
        """All lookups and loads of a step have been made. What is preempted may ask once more."""
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
                keys, state.match = state.finding.result(0)
                state.keys = max(state.keys, bytearray(keys), key=len)

    def remove(self, request_id: str) -> None:
        """A request has ended."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._let_go(state)

    def forget(self) -> None:
        """The weights may have changed: from here on chunks have other names, and these requests no cache."""
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
        """Release what was found, or will be."""
        if state.match is not None:
            self.release(state.match)
        elif state.finding is not None:
            state.finding.cancel()
            release = partial(_release_found, self._connector, state.finding)  # in its turn, after the lookup
            self._queue.submit(Transfer(release, _nothing, None, Limit()))
        state.open()

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict each other."""
        for state in self._requests.values():
            assert state.match is None or state.finding is not None
            assert len(state.keys) <= len(state.hashes) * KEY_BYTES

    def close(self) -> None:
        """Blocks for seconds at most."""
        self._queue.close()
        self._connector.close()


def _nothing() -> None:
    """A release that is not made: the lease runs out."""


def _release_found(connector: Connector, finding: Transfer[_Found]) -> None:
    if finding.done():
        connector.release(finding.result(0).match)
