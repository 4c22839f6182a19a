"""Flushes on their way to the disks: each is answered once every directory has recorded it, or cannot.

A disk may come back after another one was put in its place. Flushes in between are kept for it, but only while the
daemon lives, so such a flush is not durable. Restart the daemon to end that. A disk that hangs or fails may also come
back without its last flushes: what it has not confirmed is kept for it too.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from pathlib import Path

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf

FLUSH_S = 10.0
"""Time after which a flush that some disk has not recorded is answered as not durable."""
MAX_KEPT = 4096
"""Flushes that wait for one directory. When there are more, all of their namespaces are flushed."""
MAX_KEPT_NAMES = 16_384
"""The same once they name more namespaces than this: putting them together takes a slice."""
MAX_FORMER = 64
"""Directories that were replaced by others: beyond that the oldest are forgotten."""
TOLD_AT_ONCE = 64
"""Namespaces that a directory is told of in one slice: a millisecond or two."""
ANSWERED_AT_ONCE = 64
"""Flushes answered as not durable in one slice."""
LAST_WORDS_S = 2.0
"""Time in which a daemon that shuts down tells directories the rest."""


class FlushUnderWay:
    """One flush; `done(blocks, durable)` is called once."""

    def __init__(self, done: Callable[[int, bool], None] | None = None) -> None:
        self.blocks = 0
        self.waiting = 1  # answers of disks, and one until all have been asked
        self.unwritten = 0  # changes that catalogs of open directories have not confirmed
        self.over = False
        self.unconfirmed: Sequence[str] = ()
        self.lost = ""
        self.end_s = math.inf
        self._done = done  # until it was called: it may refer to this flush
        self._durable = True

    @property
    def settled(self) -> bool:
        """See `FlushBelow`."""
        return self.over and not self.unwritten

    def noted(self, ok: bool) -> None:
        """One of the awaited answers has come."""
        self.waiting -= 1
        self._durable = self._durable and ok
        if self.waiting == 0:
            self.answer(self._durable)

    def answer(self, durable: bool) -> None:
        """Report the result, if that has not been done."""
        if not self.over:
            self.over = True
            self.unconfirmed = () if durable else ("nvme",)
            done, self._done = self._done, None
            if done is not None:
                done(self.blocks, durable)


_Kept = tuple[Sequence[Namespace] | None, bytes, FlushUnderWay]
"""Which namespaces (None: all), which key (empty: all), and the flush that waits for it."""
_Told = tuple[Sequence[Namespace] | None, bytes]
"""As `_Kept`, without the flush."""


class _ToldShelf:
    """What an open directory was told and has not confirmed: one change for each namespace, numbered in order."""

    def __init__(self) -> None:
        self.again: dict[int, _Told] = {}
        """What it is told again if it closes and opens."""
        self._flushes: dict[int, FlushUnderWay] = {}  # of all these changes
        self._refused = 0  # the last change that could not be written at first: the catalog tries it again by itself

    def add(self, number: int, namespace: Namespace, key: bytes, flush: FlushUnderWay) -> None:
        """The next change, which was not confirmed at once."""
        self._flushes[number] = flush
        flush.unwritten += 1
        if len(self.again) >= MAX_KEPT:
            every = _named(namespaces for namespaces, _ in self.again.values())
            self.again.clear()
            self.again[0] = every, b""
        self.again[number] = [namespace], key

    def noted(self, number: int, flush: FlushUnderWay, ok: bool) -> None:
        """The directory says whether a change is durable. If not, it retries that before any later one."""
        if not ok:
            self._refused = max(self._refused, number)
        elif number in self._flushes:
            self._written(number)
        if ok and number in self.again:
            for earlier in list(takewhile(number.__ge__, self.again)):
                del self.again[earlier]
        flush.noted(ok)

    def _written(self, number: int) -> None:
        for earlier in list(takewhile(number.__ge__, self._flushes)):
            self._flushes.pop(earlier).unwritten -= 1

    def works_again(self) -> None:
        """Its catalog has no trouble: it has written what it could not at first, and says nothing of that."""
        if self._refused:
            self._written(self._refused)
            self._refused = 0

    def gone(self) -> None:
        """Its catalog is closed: what it has not written takes no memory any more."""
        for flush in self._flushes.values():
            flush.unwritten -= 1
        self._flushes.clear()


class _KeptFlushes:
    """Flushes that wait for one directory, in order: when there are too many, all of their namespaces are flushed.

    Those are not durable: they go to `given_up`, to be told so.
    """

    def __init__(self, given_up: deque[FlushUnderWay]) -> None:
        self.given_up = given_up
        self.added = 0
        """How many flushes, those that were put together included."""
        self._flushes: list[_Kept] = []
        self._names = 0

    def __iter__(self) -> Iterator[_Kept]:
        return iter(self._flushes)

    def since(self, added: int) -> list[_Kept]:
        """Those behind the first `added`; all where some of them were put together. Nobody waits for these."""
        first = max(0, len(self._flushes) - (self.added - added))
        return [(namespaces, key, FlushUnderWay()) for namespaces, key, _ in self._flushes[first:]]

    def add(self, one: _Kept) -> None:
        """The next one."""
        if len(self._flushes) >= MAX_KEPT or self._names > MAX_KEPT_NAMES:
            self.given_up.extend(flush for _, _, flush in self._flushes)
            every = _named(namespaces for namespaces, _, _ in self._flushes)
            self._flushes = [(every, b"", FlushUnderWay())]
            self._names = len(every or ())
        self._flushes.append(one)
        self.added += 1
        self._names += len(one[0] or ())


@dataclass
class _Late:
    """What a directory has yet to be told; `told` counts the namespaces of the first item that are done."""

    kept: deque[_Kept]
    told: int = 0


class Flushes:
    """Event loop only; never blocks. `every()` are all known namespaces, `clock_s` is monotonic seconds."""

    def __init__(self, every: Callable[[], Sequence[Namespace]], clock_s: Callable[[], float]) -> None:
        self._every = every
        self._clock_s = clock_s
        self._under_way: OrderedDict[FlushUnderWay, None] = OrderedDict()  # in order of their deadlines
        self._told: dict[Shelf, _ToldShelf] = {}
        self._numbers = count(1)
        self._given_up: deque[FlushUnderWay] = deque()  # not durable, and not told so yet
        self._kept: dict[Path, _KeptFlushes] = {}
        self._last: dict[Path, bytes] = {}  # which directory was open there, by the id in its superblock
        self._used: set[Path] = set()  # paths at which a directory was open
        self._of_this_life = _KeptFlushes(self._given_up)  # for directories that were open nowhere yet
        # For replaced directories, open nowhere now: what was kept for each then, and how many flushes there were.
        self._former: dict[bytes, tuple[list[_Kept], int]] = {}
        self._late: dict[Shelf, _Late] = {}  # earlier flushes that open directories have yet to be told

    def begin(
        self,
        namespaces: Sequence[Namespace],
        key: bytes,
        done: Callable[[int, bool], None],
        shelves: Sequence[Shelf],
        closed: Callable[[], Sequence[tuple[Path, bool]]],
        named: bool = False,
    ) -> _Flush:
        """A flush of all these: `shelves` drop what they are told, part by part; `closed` directories as they open.

        `closed()`: paths, and whether that may last. Then the flush is not durable, and does not wait for them. A
        directory that closes between two parts is told all of them when it opens. `named`: it is about these namespaces
        only, even if no others are known yet.
        """
        # A flush of all known namespaces includes those that only a closed directory knows.
        wanted = None if not named and len(namespaces) == len(self._every()) else namespaces
        flush = _Flush(self, wanted, key, done, shelves, closed)
        flush.keep_for_closed()
        if not self._former:  # else it is there already
            self._of_this_life.add((wanted, key, FlushUnderWay()))
        return flush

    def flush(self, shelf: Shelf, namespaces: Sequence[Namespace], key: bytes, flush: FlushUnderWay) -> None:
        """Tell an open directory of a part of a flush."""
        told = self._told.setdefault(shelf, _ToldShelf())
        for namespace in namespaces:
            flush.waiting += 1
            waiting, number = flush.waiting, next(self._numbers)
            flush.blocks += shelf.flush(namespace, key, partial(told.noted, number, flush))
            if flush.waiting == waiting:  # else it has nothing of that namespace
                told.add(number, namespace, key, flush)

    def keep(self, path: Path, one: _Kept) -> None:
        """Tell it to the directory that opens there."""
        self._kept.setdefault(path, _KeptFlushes(self._given_up)).add(one)

    def keep_for_former(self, one: _Kept, known: set[bytes]) -> bool:
        """Tell it to directories that were replaced, but for those `known`, which these are then; True if any is."""
        more = self._former.keys() - known
        if more:
            self._of_this_life.add(one)
        known |= more
        return bool(more)

    def ends_later(self, flush: FlushUnderWay) -> None:
        """Answer it at the latest in `FLUSH_S`."""
        flush.end_s = self._clock_s() + FLUSH_S
        self._under_way[flush] = None

    def answered(self, flush: FlushUnderWay) -> None:
        """It needs no deadline any more."""
        self._under_way.pop(flush, None)

    def opened(self, path: Path, shelf: Shelf) -> None:
        """A directory has opened: it is told of earlier flushes in slices. Only then are its rows loaded."""
        here, last, kept = shelf.directory.superblock.directory_id, self._last.get(path), [*self._kept.pop(path, ())]
        is_known = here in self._former or here in self._last.values()
        was_used = path in self._used  # perhaps by another disk, which took what was kept for the path
        self._used.add(path)
        for other in [one for one, opened_id in self._last.items() if opened_id == here and one != path]:
            del self._last[other]  # mount points were swapped: what was kept there was about this directory
            moved = [*self._kept.get(other, ())]
            for _, _, flush in moved:
                flush.waiting += 1
            kept = [*kept, *moved]
        self._last[path] = here
        if last != here and (last is not None or is_known):  # another disk is there: these flushes are not durable
            self._given_up.extend(flush for _, _, flush in kept)
            kept = [(namespaces, key, FlushUnderWay()) for namespaces, key, _ in kept]
        if last is not None and last != here:
            self._former[last] = kept, self._of_this_life.added
            if len(self._former) > MAX_FORMER:
                del self._former[next(iter(self._former))]
        if last != here and was_used and not is_known:  # meanwhile nothing was kept for it
            self._given_up.extend(flush for _, _, flush in kept)
            kept = self._of_this_life.since(0)
        former, added = self._former.pop(here, ([], self._of_this_life.added))
        self._late[shelf] = _Late(deque([*former, *self._of_this_life.since(added), *kept]))
        self._go_on(shelf)

    def _go_on(self, shelf: Shelf) -> None:
        late = self._late[shelf]
        if not shelf.catalog.full:  # else these would wait for the disk in memory
            self._tell(shelf, late)
        if not late.kept:
            shelf.start_loading()
            del self._late[shelf]

    def _tell(self, shelf: Shelf, late: _Late) -> None:
        """A slice."""
        left = TOLD_AT_ONCE
        while late.kept and left > 0:
            namespaces, key, flush = late.kept[0]  # stays until all of it is told: see `gone`
            every = self._every() if namespaces is None else namespaces
            part = every[late.told : late.told + left]
            self.flush(shelf, part, key, flush)
            late.told += len(part)
            left -= max(1, len(part))
            if late.told >= len(every):
                late.kept.popleft()
                late.told = 0
                if namespaces is None:
                    shelf.drop_unserved(flush.noted)
                else:
                    flush.noted(True)

    def gone(self, shelf: Shelf) -> None:
        """A directory is no longer open: it is told again what it has not confirmed before it is next used."""
        path = shelf.directory.path
        if shelf in self._told:
            told = self._told.pop(shelf)
            told.gone()
            for namespaces, key in told.again.values():
                self.keep(path, (namespaces, key, FlushUnderWay()))
        if shelf in self._late:
            for late in self._late.pop(shelf).kept:
                self.keep(path, late)

    def work(self) -> bool:
        """Answer flushes at their deadline, and tell directories a slice of what is due; True while there is more."""
        for _ in range(min(ANSWERED_AT_ONCE, len(self._under_way))):
            flush = next(iter(self._under_way))
            if self._clock_s() < flush.end_s:
                break
            flush.answer(durable=False)
        for _ in range(min(ANSWERED_AT_ONCE, len(self._given_up))):
            self._given_up.popleft().noted(False)
        for shelf, told in self._told.items():
            if not shelf.catalog.error:
                told.works_again()
        for shelf in list(self._late):
            self._go_on(shelf)
        # A directory whose catalog is full is told more at a later tick.
        return bool(self._given_up) or any(not shelf.catalog.full for shelf in self._late)

    def close(self) -> None:
        """Before the directories are closed: tell them the rest, for a second or two. Their rows are not loaded."""
        end_s = self._clock_s() + LAST_WORDS_S
        for shelf, late in self._late.items():
            while late.kept and self._clock_s() < end_s:
                self._tell(shelf, late)
        self._late.clear()


class _Flush(FlushUnderWay):
    """Implements `FlushBelow`; see `Flushes.begin`."""

    def __init__(
        self,
        flushes: Flushes,
        wanted: Sequence[Namespace] | None,
        key: bytes,
        done: Callable[[int, bool], None],
        shelves: Sequence[Shelf],
        closed: Callable[[], Sequence[tuple[Path, bool]]],
    ) -> None:
        super().__init__(done)
        self._flushes = flushes
        self._wanted = wanted
        self._key = key
        self._shelves = shelves
        self._closed = closed
        self._kept_for = set[Path]()
        self._kept_for_former = set[bytes]()

    def keep_for_closed(self) -> None:
        """Keep it for directories that are not open now, or not there any more."""
        if self._flushes.keep_for_former((self._wanted, self._key, FlushUnderWay()), self._kept_for_former):
            self.waiting += 1
            self.noted(False)
        now = self._closed()
        self._kept_for.intersection_update(path for path, _ in now)  # what was open in between is told again
        for path, lasting in now:
            if path not in self._kept_for:
                self._kept_for.add(path)
                self.waiting += 1
                self._flushes.keep(path, (self._wanted, self._key, FlushUnderWay() if lasting else self))
                if lasting:
                    self.noted(False)

    def forget(self, namespaces: Sequence[Namespace]) -> None:
        """See `FlushBelow`."""
        self.keep_for_closed()
        for shelf in self._shelves:
            self._flushes.flush(shelf, namespaces, self._key, self)

    def end(self) -> None:
        """See `FlushBelow`."""
        self._flushes.ends_later(self)
        done, self._done = self._done, None  # if this raises, the flush is over at its deadline
        for shelf in self._shelves if self._wanted is None else ():
            self.waiting += 1
            shelf.drop_unserved(self.noted)
        self._done = done
        self.noted(True)

    def answer(self, durable: bool) -> None:
        """See `FlushUnderWay`."""
        self._flushes.answered(self)
        super().answer(durable)


def _named(flushed: Iterable[Sequence[Namespace] | None]) -> list[Namespace] | None:
    """The namespaces of several flushes, each once; None if any of them is about all namespaces."""
    found: dict[Namespace, None] = {}
    for namespaces in flushed:
        if namespaces is None:
            return None
        found.update(dict.fromkeys(namespaces))
    return list(found)
