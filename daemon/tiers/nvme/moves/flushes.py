"""Flushes on their way to the disks: each is answered once every directory has recorded it, or cannot.

Flushes are numbered. Of each namespace the number of its last flush is kept, and of each directory that was open in
this life up to which number it has recorded them. A directory that opens, whichever it is and wherever, first drops
each namespace that was flushed after that. So nothing comes back from a disk that was away, that failed before it
recorded its last flushes, or in whose place another one was for a while. Flushes of single blocks are told as they
were, as long as they are few; then the whole namespace is dropped.

The numbers end with the daemon. So a flush is durable only if all directories that are configured, or were open, have
recorded it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count, takewhile
from pathlib import Path

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.catalog.changes import Done
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf

FLUSH_S = 10.0
"""Time after which a flush that some disk has not recorded is answered as not durable."""
MAX_KEYS, MAX_KEY_NAMES = 256, 16_384
"""Flushes of single blocks that directories are told as they were, and namespaces in them. Older ones become flushes of
their namespaces."""
TOLD_AT_ONCE = 64
"""Namespaces that a directory is told of in one slice: a millisecond or two."""
ANSWERED_AT_ONCE = 64
"""Flushes answered in one slice at their deadline, or once a directory has opened."""
LAST_WORDS_S = 2.0
"""Time in which a daemon that shuts down tells directories the rest."""


class FlushUnderWay:
    """One flush, or the earlier ones that a directory is told as it opens; `done(blocks, durable)` is called once."""

    def __init__(self, done: Callable[[int, bool], None]) -> None:
        self.blocks = 0
        self.waiting = 1  # answers of disks, and one until all have been asked
        self.unwritten = 0  # changes that catalogs of open directories have not confirmed
        self.over = False
        self.unconfirmed: Sequence[str] = ()
        self.lost = ""
        self.end_s = math.inf
        self.is_durable = True
        """False once it is known that it cannot be."""
        self._done: Callable[[int, bool], None] | None = done  # until it was called: it may refer to this flush

    @property
    def settled(self) -> bool:
        """See `FlushBelow`."""
        return self.over and not self.unwritten

    def noted(self, ok: bool) -> None:
        """One of the awaited answers has come."""
        self.waiting -= 1
        self.is_durable = self.is_durable and ok
        if self.waiting == 0:
            self.answer(self.is_durable)

    def answer(self, durable: bool) -> None:
        """Report the result, if that has not been done."""
        if not self.over:
            self.over = True
            self.unconfirmed = () if durable else ("nvme",)
            done, self._done = self._done, None
            if done is not None:
                done(self.blocks, durable)


_Part = tuple[Sequence[Namespace] | None, bytes]
"""Which namespaces (None: all, served or not), and which key of theirs (empty: all)."""


class _Owed:
    """What a directory that has opened has yet to be told. `told`: namespaces of the first part."""

    def __init__(self, parts: Iterable[_Part], flush: FlushUnderWay) -> None:
        self.parts = deque(parts)
        self.flush = flush
        self.told = 0


class _OpenDirectory:
    """What an open directory was told and has not confirmed: one change for each namespace, in order."""

    def __init__(self, recorded: int, owed: _Owed) -> None:
        self.recorded = recorded
        """It has recorded the flushes up to this number; later ones, too, apart from its changes and what is owed."""
        self.owed: _Owed | None = owed
        self._changes: dict[int, tuple[int, FlushUnderWay]] = {}
        self._telling = 0
        self._refused = 0  # the last change that could not be written at first: the catalog tries it again by itself
        self._presumed = math.inf  # the first flush of those written by such a trial, as it seems
        self._failed = math.inf  # the first flush that it could not be told of

    def tell(self, change: int, number: int, of: FlushUnderWay, call: Callable[[Done], object]) -> None:
        """The next change, of the flush with that number: `call(done)` asks for it."""
        self._changes[change] = number, of
        of.unwritten += 1
        of.waiting += 1
        self._telling = change
        try:
            call(partial(self._noted, change, of))
        except BaseException:  # a bug of ours, which is the answer: it takes no memory, and is told again
            if self._changes.pop(change, None) is not None:  # else it was confirmed before that
                of.unwritten -= 1
            self._failed = min(self._failed, number)
            raise
        finally:
            self._telling = 0

    def _noted(self, change: int, of: FlushUnderWay, ok: bool) -> None:
        """The directory says whether a change is durable. If not, it retries that before any later one."""
        if not ok:
            self._refused = max(self._refused, change)
        elif change == self._telling:  # it has nothing of the kind, and says nothing of earlier changes
            del self._changes[change]
            of.unwritten -= 1
        elif change in self._changes:
            self._written(change)
            self._presumed = math.inf
        of.noted(ok)

    def _written(self, change: int) -> float:
        """It has this change and all before it; the lowest number of a flush of theirs."""
        lowest = math.inf
        for earlier in list(takewhile(change.__ge__, self._changes)):
            number, flush = self._changes.pop(earlier)
            flush.unwritten -= 1
            lowest = min(lowest, number)
        return lowest

    def works_again(self) -> None:
        """Its catalog has no trouble: it has written what it could not at first, and says nothing of that."""
        if self._refused:
            self._presumed = min(self._presumed, self._written(self._refused))
            self._refused = 0

    def close(self, last: int) -> int:
        """It is open no more. It was told of all flushes up to the `last`; returns up to which it has recorded them."""
        unsure = int(min(last + 1, self._failed, self._presumed, self._written(next(reversed(self._changes), 0))))
        if self.owed is None:
            return unsure - 1
        self.owed.flush.answer(durable=False)
        return self.recorded


class Flushes:
    """Event loop only; never blocks. `every()` are all known namespaces, `clock_s` is monotonic seconds."""

    def __init__(self, every: Callable[[], Sequence[Namespace]], clock_s: Callable[[], float]) -> None:
        self._every = every
        self._clock_s = clock_s
        self._number = 0
        self._flushed: dict[Namespace, int] = {}  # the number of its last flush
        self._all_flushed = 0  # the number of the last flush of everything
        self._of_keys: deque[tuple[int, _Part]] = deque()  # flushes of single blocks, with their numbers
        self._key_names = 0  # namespaces in these, nearly: there may be more by now
        self._untold: dict[int, _Flush] = {}  # those that open directories were not wholly told of
        self._recorded: dict[bytes, int] = {}  # of directories that were open and are not: up to which number
        self._open: dict[Shelf, _OpenDirectory] = {}
        self._changes = count(1)
        self._under_way: OrderedDict[FlushUnderWay, None] = OrderedDict()  # in order of their deadlines
        self._waiting: dict[Path, dict[FlushUnderWay, None]] = {}  # for the directory that opens there
        self._answers: deque[tuple[FlushUnderWay, bool]] = deque()

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
        directory that closes between two parts drops all of them when it opens. `named`: it is about these namespaces
        only, even if no others are known yet.
        """
        self._number += 1
        # A flush of all known namespaces includes those that only a closed directory knows.
        is_all = not named and len(namespaces) == len(self._every())
        names = None if is_all else namespaces
        if not key:
            self._note(self._number, names)
        else:
            self._of_keys.append((self._number, (names, key)))
            self._key_names += len(namespaces)
            while len(self._of_keys) > MAX_KEYS or self._key_names > MAX_KEY_NAMES:
                number, (names, _) = self._of_keys.popleft()
                self._key_names -= len(self._every() if names is None else names)
                self._note(number, names)
        flush = self._untold[self._number] = _Flush(self, self._number, is_all, key, done, shelves, closed)
        flush.look_for_closed()
        return flush

    def _note(self, number: int, names: Sequence[Namespace] | None) -> None:
        """All of these were flushed then."""
        if names is None:
            self._all_flushed = max(self._all_flushed, number)
        else:
            self._flushed.update((one, max(number, self._flushed.get(one, 0))) for one in names)

    @property
    def has_former(self) -> bool:
        """True if a directory was open in this life and is not now."""
        return bool(self._recorded)

    def tell(self, shelf: Shelf, namespaces: Sequence[Namespace], key: bytes, number: int, of: FlushUnderWay) -> None:
        """Tell an open directory of a part of the flush with that number."""
        directory = self._open[shelf]

        def flush(namespace: Namespace, done: Done) -> None:
            of.blocks += shelf.flush(namespace, key, done)

        for namespace in namespaces:
            directory.tell(next(self._changes), number, of, partial(flush, namespace))

    def drop_unserved(self, shelf: Shelf, number: int, of: FlushUnderWay) -> None:
        """Tell an open directory that the flush is also about namespaces that cannot be served."""
        self._open[shelf].tell(next(self._changes), number, of, shelf.drop_unserved)

    def wait(self, path: Path, flush: FlushUnderWay) -> None:
        """It waits for an answer of the directory that opens there."""
        flush.waiting += 1
        self._waiting.setdefault(path, {})[flush] = None

    def told(self, number: int, flush: FlushUnderWay) -> None:
        """Open directories were told of all of it: it is answered in `FLUSH_S` at the latest."""
        del self._untold[number]
        flush.end_s = self._clock_s() + FLUSH_S
        self._under_way[flush] = None

    def answered(self, flush: FlushUnderWay) -> None:
        """It needs no deadline any more, and no directory."""
        self._under_way.pop(flush, None)
        for waiting in self._waiting.values():
            waiting.pop(flush, None)

    # --- directories -------------------------------------------------------------------------------

    def opened(self, path: Path, shelf: Shelf) -> None:
        """A directory has opened: it is told of earlier flushes in slices. Only then are its rows loaded."""
        recorded = self._recorded.pop(shelf.directory.superblock.directory_id, 0)
        waiting, parts = self._waiting.pop(path, {}), list[_Part]()
        if self._all_flushed > recorded:
            parts = [(None, b"")]
        else:
            parts = [([one for one, number in self._flushed.items() if number > recorded], b"")]
            parts += [part for number, part in self._of_keys if number > recorded]

        def done(_: int, durable: bool) -> None:
            self._answers.extend((flush, durable) for flush in waiting)

        self._open[shelf] = _OpenDirectory(recorded, _Owed(parts, FlushUnderWay(done)))
        self._tell_owed(shelf)

    def _tell_owed(self, shelf: Shelf) -> bool:
        """A slice of what a directory is owed, and then its rows; True while there is more."""
        directory = self._open[shelf]
        owed = directory.owed
        if owed is None or shelf.catalog.full:  # what is told now would wait for the disk in memory
            return False
        if self._tell_parts(shelf, owed, directory.recorded + 1):
            return True
        directory.owed = None
        owed.flush.noted(True)
        shelf.start_loading()
        return False

    def _tell_parts(self, shelf: Shelf, owed: _Owed, number: int) -> bool:
        left = TOLD_AT_ONCE
        while owed.parts and left > 0:
            names, key = owed.parts[0]
            every = self._every() if names is None else names
            part = every[owed.told : owed.told + left]
            self.tell(shelf, part, key, number, owed.flush)
            owed.told += len(part)
            left -= max(1, len(part))
            if owed.told >= len(every):
                owed.parts.popleft()
                owed.told = 0
                if names is None:
                    self.drop_unserved(shelf, number, owed.flush)
        return bool(owed.parts)

    def gone(self, shelf: Shelf) -> None:
        """A directory is no longer open: it has not confirmed all flushes, nor will another in its place in time."""
        last = min([self._number, *(number - 1 for number in self._untold)])
        for flush in (*self._under_way, *self._untold.values()):
            flush.is_durable = False
        here, recorded = shelf.directory.superblock.directory_id, self._open.pop(shelf).close(last)
        self._recorded[here] = min(recorded, self._recorded.get(here, recorded))  # a copy of it may be open, too

    # --- in slices ---------------------------------------------------------------------------------

    def work(self) -> bool:
        """Answer flushes, and tell directories a slice of what they are owed; True while there is more."""
        for _ in range(min(ANSWERED_AT_ONCE, len(self._under_way))):
            flush = next(iter(self._under_way))
            if self._clock_s() < flush.end_s:
                break
            flush.answer(durable=False)
        for _ in range(min(ANSWERED_AT_ONCE, len(self._answers))):
            flush, durable = self._answers.popleft()
            flush.noted(durable)
        for shelf, directory in self._open.items():
            if not shelf.catalog.error:
                directory.works_again()
        # A directory whose catalog is full is told more at a later tick.
        return any(self._tell_owed(shelf) for shelf in self._open) or bool(self._answers)

    def close(self) -> None:
        """Before the directories are closed: tell them the rest, for a second or two."""
        end_s = self._clock_s() + LAST_WORDS_S
        for shelf, directory in self._open.items():
            owed, number = directory.owed, directory.recorded + 1
            while owed is not None and self._clock_s() < end_s and self._tell_parts(shelf, owed, number):
                pass


class _Flush(FlushUnderWay):
    """Implements `FlushBelow`; see `Flushes.begin`."""

    def __init__(
        self,
        flushes: Flushes,
        number: int,
        is_all: bool,
        key: bytes,
        done: Callable[[int, bool], None],
        shelves: Sequence[Shelf],
        closed: Callable[[], Sequence[tuple[Path, bool]]],
    ) -> None:
        super().__init__(done)
        self._flushes = flushes
        self._number = number
        self._is_all = is_all
        self._key = key
        self._shelves = shelves
        self._closed = closed
        self._known_closed = set[Path]()

    def look_for_closed(self) -> None:
        """Directories that are not open now drop it as they open: wait for those that will at once."""
        self.is_durable = self.is_durable and not self._flushes.has_former
        now = self._closed()
        self._known_closed.intersection_update(path for path, _ in now)
        for path, lasting in now:
            if path in self._known_closed:
                continue
            self._known_closed.add(path)
            if lasting:
                self.is_durable = False
            else:
                self._flushes.wait(path, self)

    def forget(self, namespaces: Sequence[Namespace]) -> None:
        """See `FlushBelow`."""
        self.look_for_closed()
        for shelf in self._shelves:
            self._flushes.tell(shelf, namespaces, self._key, self._number, self)

    def end(self) -> None:
        """See `FlushBelow`."""
        self._flushes.told(self._number, self)
        done, self._done = self._done, None  # if this raises, the flush is over at its deadline
        for shelf in self._shelves if self._is_all else ():
            self._flushes.drop_unserved(shelf, self._number, self)
        self._done = done
        self.noted(True)

    def give_up(self) -> None:
        """See `FlushBelow`. Directories that open are told of all of it."""
        self._done = None
        self.answer(False)

    def answer(self, durable: bool) -> None:
        """See `FlushUnderWay`."""
        self._flushes.answered(self)
        super().answer(durable)
