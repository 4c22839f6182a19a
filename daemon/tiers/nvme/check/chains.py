"""The chains that the rows of a closed directory form, and what each row is worth."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator

from tiercache.daemon.tiers.nvme.catalog.rows import ROOT_KEY, PlacedRow, Row

_ROOT, _MISSING = -1, -2

UNKNOWN, _WALKING, _GOOD, FLUSHED, _ORPHAN, BAD, _BEHIND = range(7)
"""States of a row. The last three are lost: its parent is missing, it is wrong itself, or a block before it is lost."""


class Chains:
    """The readable rows of a directory, numbered in order of their places."""

    def __init__(self) -> None:
        self._places = array("q")
        self._parents = array("q")
        self._states = array("B")
        self._epochs = array("I")
        self._numbers: dict[bytes, int] = {}

    def add(self, place: int, row: Row, state: int) -> int | None:
        """Add the next row: UNKNOWN, FLUSHED or BAD. If its block has a row already it is BAD; returns that place."""
        number = other = len(self._places)
        if state != BAD:
            other = self._numbers.setdefault(_name(row.namespace, row.key), number)
        self._places.append(place)
        self._parents.append(_MISSING)
        self._epochs.append(row.epoch)
        self._states.append(state if other == number else BAD)
        return None if other == number else self._places[other]

    def link(self, rows: Iterable[PlacedRow], flushed_before: Callable[[int, bytes], int]) -> None:
        """Give each row its parent and a state, once: `rows` are those that were added, in the same order."""
        for number, (_, row) in enumerate(rows):
            if row.parent == ROOT_KEY:
                self._parents[number] = _ROOT
                continue
            parent = self._parents[number] = self._numbers.get(_name(row.namespace, row.parent), _MISSING)
            # The row of a block that was flushed by its key may be deleted already, or replaced by one stored
            # since, while the rows behind it remain.
            since = flushed_before(row.namespace, row.parent) if parent == _MISSING else self._epochs[parent]
            if self._states[number] == UNKNOWN and row.epoch < since:
                self._states[number] = FLUSHED
        self._numbers.clear()
        self._judge()

    def _judge(self) -> None:
        """Follow every chain to its root: each row has a state afterwards."""
        states, parents = self._states, self._parents
        for start in range(len(states)):
            path = []
            at = start
            while at >= 0 and states[at] == UNKNOWN:
                states[at] = _WALKING
                path.append(at)
                at = parents[at]
            if not path:
                continue
            if at == _ROOT:
                verdict = _GOOD
            elif at == _MISSING or states[at] == _WALKING:  # the second is a cycle
                states[path.pop()] = _ORPHAN
                verdict = _BEHIND
            else:
                verdict = states[at] if states[at] in (_GOOD, FLUSHED) else _BEHIND
            for number in path:
                states[number] = verdict

    def spoil(self, numbers: Iterable[int]) -> None:
        """These rows turned out to be BAD, and the rows behind them are lost with them."""
        for number in numbers:
            self._states[number] = BAD
        for number, state in enumerate(self._states):
            if state == _GOOD:
                self._states[number] = UNKNOWN
        self._judge()

    @property
    def good_count(self) -> int:
        return self._states.count(_GOOD)

    @property
    def flushed_count(self) -> int:
        return self._states.count(FLUSHED)

    def good(self, rows: Iterable[PlacedRow], count: int) -> Iterator[tuple[int, int, Row]]:
        """Number, place and row of `count` good rows, chosen at random if there are more; `rows` as in `link`."""
        numbers = array("q", (number for number, state in enumerate(self._states) if state == _GOOD))
        chosen = None
        if count < len(numbers):
            chosen = {numbers[at] for at in random.sample(range(len(numbers)), count)}
        for number, (place, row) in enumerate(rows):
            if self._states[number] == _GOOD and (chosen is None or number in chosen):
                yield number, place, row

    def orphans(self) -> Iterator[int]:
        """Places of the rows whose parent is missing."""
        return (place for place, state in zip(self._places, self._states, strict=True) if state == _ORPHAN)

    def lost(self) -> list[int]:
        """Places of the rows that a repair deletes."""
        return [place for place, state in zip(self._places, self._states, strict=True) if state >= _ORPHAN]


def _name(namespace: int, key: bytes) -> bytes:
    return namespace.to_bytes(4, "little") + key
