"""Finds the order of a prompt's unordered segments whose stored prefix is the longest.

The idea to order what a request retrieves so that it continues what is cached is ContextPilot's. A key names a block
and all before it, so of N segments that were stored in some orders, only beginnings of those orders are there:

    placed segments     A C      all full blocks stored: each of the others may follow
    then B, D           B        its first new block is missing: no order that begins A C B has more
                        D        stored to its end: go on with A C D

A block that lies across a border belongs to the segment that completes it. The search goes on where the stored run is
longest, and stops when all of the prompt is stored, when nothing is left to look at, or at its limits.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tiercache.http.block_names import EndOfBlock
from tiercache.http.peeking import ModelBlocks, run_here, runs_here
from tiercache.http.query import Order, Query, Unordered
from tiercache.protocol.messages import KEY_BYTES, MAX_KEYS

MAX_LOOKS = 8192
"""Of one query: a segment tried at a place."""
MAX_BYTES = 16 << 20
"""Of keys that one query asks the daemon for."""
SEARCH_S = 2.0
"""Time for the search of one query."""
FIRST_BLOCKS = 4
"""Of a segment that is tried: few of them have a first block that is stored."""
MORE_BLOCKS = 4096


class BestOrder(NamedTuple):
    """The best order. In tokens, what is stored in it, and as the caller has it.

    `complete`: no other order has a longer stored prefix.
    """

    order: Order
    matched: int
    as_given: int
    complete: bool


@dataclass
class Budget:
    """What a query may still use, for all models of its name together."""

    looks: int = MAX_LOOKS
    left_bytes: int = MAX_BYTES
    until_s: float = field(default_factory=lambda: time.monotonic() + SEARCH_S)

    def take(self, looks: int, sent_bytes: int) -> None:
        """Raises BudgetSpent if that is too much, or it is too late."""
        self.looks -= looks
        self.left_bytes -= sent_bytes
        if self.looks < 0 or self.left_bytes < 0 or time.monotonic() >= self.until_s:
            raise BudgetSpent


class BudgetSpent(Exception):
    """A search has to end before it has looked at all that matters."""


class _Node(NamedTuple):
    """The segments at the beginning of a prompt; every full block of them is stored.

    Attributes:
        chosen: numbers of the segments of groups that are placed, in order.
        blocks: length of the longest match so far.
        place: where the full blocks end.
        tail: the tokens behind them.
        before: keys of the last blocks, as many as a window reaches back.
    """

    chosen: tuple[int, ...]
    blocks: int
    place: EndOfBlock
    tail: list[int]
    before: bytes


class _Slots:
    """The prompt as one segment after the other: at each place any that the group there has left.

    Places count the segments of all groups. What the caller fixed stands before a place, or after the last one.
    """

    def __init__(self, query: Query) -> None:
        self._groups = [group.unordered for group in query.groups]
        self._firsts = [0]  # the place of each group's first segment
        self._fixed: dict[int, list[int]] = {}
        for part in query.parts:
            end = self._firsts[-1]
            if isinstance(part, Unordered):
                self._firsts.append(end + len(part.unordered))
            else:
                self._fixed.setdefault(end, []).extend(part)
        self.count = self._firsts[-1]
        self.tokens = len(query.prompt(query.as_given))
        self._alike = [_alike(group) for group in self._groups]

    def fixed(self, place: int) -> list[int]:
        """The tokens that stand before the segment at that place."""
        return self._fixed.get(place, [])

    def candidates(self, chosen: tuple[int, ...]) -> Iterator[tuple[int, list[int]]]:
        """The segments that may come next: their numbers in the group, and tokens. Of equal ones only the first."""
        number = next(n for n, first in enumerate(self._firsts[1:]) if len(chosen) < first)
        group, alike, placed = self._groups[number], self._alike[number], set(chosen[self._firsts[number] :])
        tried = set()
        for segment in range(len(group)):
            if segment not in placed and alike[segment] not in tried:
                tried.add(alike[segment])
                yield segment, group[segment]

    def order(self, chosen: tuple[int, ...]) -> Order:
        """The whole order that begins so, and goes on as the caller has it."""
        orders = []
        for group, first in zip(self._groups, self._firsts, strict=False):
            begin = chosen[first : first + len(group)]
            orders.append([*begin, *(number for number in range(len(group)) if number not in begin)])
        return orders


def _alike(group: list[list[int]]) -> list[int]:
    """For each segment the number of the first one with the same tokens."""
    firsts: dict[tuple[int, ...], int] = {}
    return [firsts.setdefault(tuple(segment), number) for number, segment in enumerate(group)]


class OrderSearch:
    """The search for the engines of one card."""

    def __init__(self, stored: ModelBlocks, query: Query, budget: Budget) -> None:
        self._stored = stored
        self._query = query
        self._budget = budget
        self._slots = _Slots(query)
        self._total = min(self._slots.tokens // stored.card.block_size, MAX_KEYS)
        windows = stored.windows
        self._chains = [number for number, window in enumerate(windows) if not window]
        self._reach = max(0, max(windows, default=0) - 1)  # blocks before a run that its first match may need
        self._best, self._given, self._best_order = 0, 0, query.as_given

    def find(self) -> BestOrder:
        """The best order, the caller's own where no other is better. Raises as `Session.call` does."""
        size = self._stored.card.block_size
        self._best = self._given = self._stored.matched(self._query.prompt(self._best_order)) // size
        if not self._stored.there or self._best == self._total or not self._slots.count:
            return self._found(complete=True)
        try:
            self._search()
        except BudgetSpent:
            return self._found(complete=False)
        return self._found(complete=True)

    def _found(self, complete: bool) -> BestOrder:
        size = self._stored.card.block_size
        return BestOrder(self._best_order, self._best * size, self._given * size, complete)

    def _search(self) -> None:
        """Try segments behind the node with the longest run, one at a time, until there is nothing to try."""
        start = self._append(_Node((), 0, self._stored.names.start, [], b""), self._slots.fixed(0), ())
        open_nodes = [self._ranked(start)] if start is not None else []
        while open_nodes and self._best < self._total:
            _, node, candidates = open_nodes[0]
            following = next(candidates, None)
            if following is None:
                heapq.heappop(open_nodes)
                continue
            self._budget.take(1, 0)
            number, segment = following
            chosen = (*node.chosen, number)
            behind = self._append(node, segment + self._slots.fixed(len(chosen)), chosen)
            if behind is not None and len(chosen) < self._slots.count:
                heapq.heappush(open_nodes, self._ranked(behind))

    def _ranked(self, node: _Node) -> tuple[tuple[int, int, tuple[int, ...]], _Node, Iterator[tuple[int, list[int]]]]:
        """The node for the heap: the longest run first, then the one with most segments. No two have the same rank."""
        return (-node.blocks, -len(node.chosen), node.chosen), node, self._slots.candidates(node.chosen)

    def _append(self, node: _Node, segment: list[int], chosen: tuple[int, ...]) -> _Node | None:
        """The node with a segment more; None if a block of it is missing. Notes what is the best so far."""
        size, names = self._stored.card.block_size, self._stored.names
        blocks, place, before = node.blocks, node.place, node.before
        tokens = node.tail + segment
        whole = min(len(tokens) // size, self._total - place.blocks)
        done, step = 0, FIRST_BLOCKS
        while done < whole:
            end = min(done + step, whole)
            keys, place = names.following(place, tokens[done * size : end * size])
            reached, blocks = self._look(before, keys, place.blocks, blocks)
            if blocks > self._best:
                self._best, self._best_order = blocks, self._slots.order(chosen)
            if not reached:
                return None
            before = (before + keys)[-self._reach * KEY_BYTES :] if self._reach else b""
            done, step = end, MORE_BLOCKS
        return _Node(chosen, blocks, place, tokens[whole * size :], before)

    def _look(self, before: bytes, keys: bytes, end: int, matched: int) -> tuple[bool, int]:
        """True if the run may go on behind these keys, and the longest match, which was `matched` before them.

        The keys may begin in the middle of a prompt. In a chain, a block is only there with all before it; with a
        window, a match needs no more than the blocks before that are sent too.
        """
        sent = before + keys
        self._budget.take(0, len(sent))
        found = self._stored.peek(sent)
        count = len(sent) // KEY_BYTES
        together, behind = run_here(found), len(before) // KEY_BYTES
        if together > behind:
            matched = end - count + together
        each = runs_here(found)
        return all(each[number] == count for number in self._chains), matched
