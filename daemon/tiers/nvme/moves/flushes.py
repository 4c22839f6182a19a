"""Flushes on their way to the disks: each is answered once every directory has recorded it, or cannot.

A disk may come back after another one was put in its place. Flushes in between are kept for it, but only while the
daemon lives, so such a flush is not durable. Restart the daemon to end that. A disk that hangs or fails may also come
back without its last flushes: what it has not confirmed is kept for it too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
MAX_KEPT_NAMES = 65_536
"""The same once flushes that wait may name more namespaces than this: putting them together takes a slice."""
MAX_FORMER = 64
"""Directories that were replaced by others: beyond that the oldest are forgotten."""
TOLD_AT_ONCE = 64
"""Namespaces that a directory is told of in one slice: a millisecond or two."""
LAST_WORDS_S = 2.0
"""Time in which a daemon that shuts down tells directories the rest."""


class FlushUnderWay:
    """One flush; `done(blocks, durable)` is called once."""

    def __init__(
        self,
        done: Callable[[int, bool], None] = lambda blocks, durable: None,
        forget: Callable[[Sequence[Namespace]], None] = lambda namespaces: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.forget = forget
        """See `FlushBelow`."""
        self.end = end
        """Likewise."""
        self.blocks = 0
        self.waiting = 1  # answers of disks, and one until all have been asked
        self.over = False
        self.unconfirmed: Sequence[str] = ()
        self.lost = ""
        self.end_s = math.inf
        self._done = done
        self._durable = True

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
            self._done(self.blocks, durable)


_Kept = tuple[Sequence[Namespace] | None, bytes, FlushUnderWay]
"""Which namespaces (None: all), which key (empty: all), and the flush that waits for it."""
_Told = tuple[Sequence[Namespace] | None, bytes]
"""As `_Kept`, without the flush."""


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
        self._under_way: deque[FlushUnderWay] = deque()  # in order of their deadlines
        self._told: dict[Shelf, dict[int, _Told]] = {}  # not confirmed yet by open directories, numbered
        self._numbers = count(1)
        self._kept: dict[Path, list[_Kept]] = {}
        self._last: dict[Path, bytes] = {}  # which directory was open there, by the id in its superblock
        self._former: dict[bytes, list[_Kept]] = {}  # for replaced directories, open nowhere now
        self._used: set[Path] = set()  # paths at which a directory was open
        self._of_this_life: list[_Kept] = []  # for directories that were open nowhere yet
        self._late: dict[Shelf, _Late] = {}  # earlier flushes that open directories have yet to be told

    def begin(
        self,
        namespaces: Sequence[Namespace],
        key: bytes,
        done: Callable[[int, bool], None],
        shelves: Sequence[Shelf],
        closed: Callable[[], Sequence[tuple[Path, bool]]],
        named: bool = False,
    ) -> FlushUnderWay:
        """A flush of all these: `shelves` drop what they are told, part by part; `closed` directories as they open.

        `closed()`: paths, and whether that may last. Then the flush is not durable, and does not wait for them. A
        directory that closes between two parts is told all of them when it opens. `named`: it is about these namespaces
        only, even if no others are known yet.
        """
        # A flush of all known namespaces includes those that only a closed directory knows.
        wanted = None if not named and len(namespaces) == len(self._every()) else namespaces
        kept_for = set[Path]()

        def keep_for_closed() -> None:
            now = closed()
            kept_for.intersection_update(path for path, _ in now)  # what was open in between is told again
            for path, lasting in now:
                if path not in kept_for:
                    kept_for.add(path)
                    flush.waiting += 1
                    self._keep(path, (wanted, key, FlushUnderWay() if lasting else flush))
                    if lasting:
                        flush.noted(False)

        def forget(part: Sequence[Namespace]) -> None:
            keep_for_closed()
            for shelf in shelves:
                self._flush(shelf, part, key, flush)

        def end() -> None:
            flush.end_s = self._clock_s() + FLUSH_S
            self._under_way.append(flush)
            flush.noted(True)

        flush = FlushUnderWay(done, forget, end)
        keep_for_closed()
        _add(self._of_this_life, (wanted, key, FlushUnderWay()))
        for kept in self._former.values():
            _add(kept, (wanted, key, FlushUnderWay()))
            flush.waiting += 1
            flush.noted(False)
        return flush

    def _flush(self, shelf: Shelf, namespaces: Sequence[Namespace], key: bytes, flush: FlushUnderWay) -> None:
        told = self._told.setdefault(shelf, {})
        for namespace in namespaces:
            flush.waiting += 1
            waiting, number = flush.waiting, next(self._numbers)
            flush.blocks += shelf.flush(namespace, key, partial(_noted, told, number, flush))
            if flush.waiting < waiting:
                continue  # confirmed at once: it has nothing of that namespace
            if len(told) >= MAX_KEPT:
                every = _named(namespaces for namespaces, _ in told.values())
                told.clear()
                told[0] = every, b""
            told[number] = [namespace], key

    def _keep(self, path: Path, one: _Kept) -> None:
        _add(self._kept.setdefault(path, []), one)

    def opened(self, path: Path, shelf: Shelf) -> None:
        """A directory has opened: it is told of earlier flushes in slices. Only then are its rows loaded."""
        here, last, kept = shelf.directory.superblock.directory_id, self._last.get(path), self._kept.pop(path, [])
        is_known = here in self._former or here in self._last.values()
        was_used = path in self._used  # perhaps by another disk, which took what was kept for the path
        self._used.add(path)
        for other in [one for one, opened_id in self._last.items() if opened_id == here and one != path]:
            del self._last[other]  # mount points were swapped: what was kept there was about this directory
            moved = self._kept.get(other, [])
            for _, _, flush in moved:
                flush.waiting += 1
            kept = [*kept, *moved]
        self._last[path] = here
        if last != here and (last is not None or is_known):  # another disk is there: these flushes are not durable
            for _, _, flush in kept:
                flush.noted(False)
            kept = [(namespaces, key, FlushUnderWay()) for namespaces, key, _ in kept]
        if last is not None and last != here:
            self._former[last] = list(kept)
            if len(self._former) > MAX_FORMER:
                del self._former[next(iter(self._former))]
        if last != here and was_used and not is_known:  # meanwhile nothing was kept for it
            for _, _, flush in kept:
                flush.noted(False)
            kept = [(namespaces, key, FlushUnderWay()) for namespaces, key, _ in self._of_this_life]
        self._late[shelf] = _Late(deque([*self._former.pop(here, ()), *kept]))
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
            self._flush(shelf, part, key, flush)
            late.told += len(part)
            left -= max(1, len(part))
            if late.told >= len(every):
                late.kept.popleft()
                late.told = 0
                flush.noted(True)

    def gone(self, shelf: Shelf) -> None:
        """A directory is no longer open: it is told again what it has not confirmed before it is next used."""
        path = shelf.directory.path
        for namespaces, key in self._told.pop(shelf, {}).values():
            self._keep(path, (namespaces, key, FlushUnderWay()))
        if shelf in self._late:
            for late in self._late.pop(shelf).kept:
                self._keep(path, late)

    def work(self) -> bool:
        """Answer flushes at their deadline, and tell directories a slice of what is due; True while there is more."""
        while self._under_way and (self._under_way[0].over or self._clock_s() >= self._under_way[0].end_s):
            self._under_way.popleft().answer(durable=False)
        for shelf in list(self._late):
            self._go_on(shelf)
        return any(not shelf.catalog.full for shelf in self._late)  # a full one is told more at a later tick

    def close(self) -> None:
        """Before the directories are closed: tell them the rest, for a second or two. Their rows are not loaded."""
        end_s = self._clock_s() + LAST_WORDS_S
        for shelf, late in self._late.items():
            while late.kept and self._clock_s() < end_s:
                self._tell(shelf, late)
        self._late.clear()


def _noted(told: dict[int, _Told], number: int, flush: FlushUnderWay, ok: bool) -> None:
    """A directory says whether a flush is durable there. If not, it retries that before any later one."""
    if ok and number in told:
        for earlier in list(takewhile(number.__ge__, told)):
            del told[earlier]
    flush.noted(ok)


def _add(kept: list[_Kept], one: _Kept) -> None:
    names = len(one[0] or ())
    if len(kept) >= MAX_KEPT or len(kept) * names > MAX_KEPT_NAMES:
        for _, _, flush in kept:
            flush.noted(False)
        kept[:] = [(_named(namespaces for namespaces, _, _ in kept), b"", FlushUnderWay())]
    kept.append(one)


def _named(flushed: Iterable[Sequence[Namespace] | None]) -> list[Namespace] | None:
    """The namespaces of several flushes, each once; None if any of them is about all namespaces."""
    found: dict[int, Namespace] = {}
    for namespaces in flushed:
        if namespaces is None:
            return None
        found.update((id(namespace), namespace) for namespace in namespaces)
    return list(found.values())
