"""Removes values that are old or too much, and files that were never finished. One host at a time does this.

A pass looks at every value once, in slices. It removes what is older than `ttl`, and counts the rest by age. If that is
more than `size`, the counts say how old a value must be to go, and the next pass removes those while it counts anew. So
a pass needs no list of files, and the oldest go first, to within a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tiercache.daemon.tiers.shared.stores.folder.lease import JanitorLease, file_system_time_ns
from tiercache.daemon.tiers.shared.stores.folder.settings import FolderSettings
from tiercache.daemon.tiers.shared.stores.folder.tree import Tree, as_store_error
from tiercache.daemon.tiers.shared.stores.store import StoreError
from tiercache.ground.units import format_bytes

SLICE_FILES = 256
SLICE_PAUSE_S = 0.01
PASS_PAUSE_S = 60.0
TRY_S = 60.0
"""How often a host without the lease tries to get it, and the pause after a step that failed."""
DRAFT_S = 3600.0
"""A file in `tmp` that is older belongs to a process that is gone."""
STEP_S = 60
STEPS = 20_000
"""Bytes are counted by age, in steps of `STEP_S`. All that is older than so many steps counts as one more."""
KEEP_SHARE = 0.95
"""A full folder is brought down to this share of its size, so that not every pass removes."""
_FAN = re.compile(r"[0-9a-f]{3}")

log = logging.getLogger("tiercache.daemon")


@dataclass(slots=True)
class _Surplus:
    """What the counts of the last pass say to remove: all before one time, and part of what is before another."""

    all_before_ns: int = 0
    some_before_ns: int = 0
    some_bytes: int = 0


@dataclass(slots=True)
class _Pass:
    now_ns: int
    surplus: _Surplus
    kept: dict[int, int] = field(default_factory=dict)
    """Bytes by age."""
    removed: int = 0
    removed_bytes: int = 0


class Janitor:
    """Cleans up one folder, in a thread of its own."""

    def __init__(self, settings: FolderSettings) -> None:
        self._settings = settings
        self._lease = JanitorLease()
        self._id = secrets.token_hex(8)
        self._walk: Iterator[None] | None = None
        self._surplus: _Surplus | None = None

    def run(self) -> None:
        """Never returns."""
        told = ""
        while True:
            try:
                pause_s, text = self.step(), ""
            except (OSError, StoreError) as error:
                pause_s = TRY_S
                self._walk = None
                problem = error if isinstance(error, StoreError) else as_store_error(self._settings.path, error)
                text = problem.text
                if text != told:
                    log.warning("the shared folder is not cleaned up at the moment: %s", text)
            told = text
            time.sleep(pause_s)

    def step(self) -> float:
        """One slice; returns how many seconds to wait until the next one. Raises OSError and StoreError."""
        with Tree(self._settings.path) as tree:
            if not self._lease.hold(tree):
                self._walk = None
                return TRY_S
        if self._walk is None:
            self._walk = self._pass()
        for _ in self._walk:
            return SLICE_PAUSE_S
        self._walk = None
        return PASS_PAUSE_S if self._surplus is None else SLICE_PAUSE_S

    def _pass(self) -> Iterator[None]:
        with Tree(self._settings.path) as tree:
            now_ns = file_system_time_ns(tree, self._id)
            fans = _fans(tree.base)
            yield from self._remove_drafts(tree.base, now_ns)
        this = _Pass(now_ns, self._surplus or _Surplus())
        self._surplus = None
        for fan in fans:
            with Tree(self._settings.path) as tree:
                folder = _open(tree.values, fan)
            if folder >= 0:
                try:
                    yield from self._sweep(folder, this)
                finally:
                    os.close(folder)
            yield
        self._surplus = self._count_up(this)
        if this.removed:
            size = format_bytes(this.removed_bytes)
            log.info("removed %d old values from the shared folder %s: %s", this.removed, self._settings.path, size)

    def _remove_drafts(self, base: int, now_ns: int) -> Iterator[None]:
        folder = _open(base, "tmp")
        try:
            for names in _slices(folder):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode) and now_ns - found.st_mtime_ns > DRAFT_S * 1e9:
                            os.unlink(name, dir_fd=folder)
                yield
        finally:
            os.close(folder)

    def _sweep(self, folder: int, this: _Pass) -> Iterator[None]:
        for names in _slices(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._look_at(folder, name, this)
            yield

    def _look_at(self, folder: int, name: str, this: _Pass) -> None:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            return  # no value
        written_ns, surplus = found.st_mtime_ns, this.surplus
        if this.now_ns - written_ns > self._settings.ttl_s * 1e9 or written_ns < surplus.all_before_ns:
            goes = True
        else:
            goes = surplus.some_bytes > 0 and written_ns < surplus.some_before_ns
            surplus.some_bytes -= found.st_size if goes else 0
        if goes:
            os.unlink(name, dir_fd=folder)
            this.removed += 1
            this.removed_bytes += found.st_size
        else:
            step = min(max(0, (this.now_ns - written_ns) // (STEP_S * 10**9)), STEPS)
            this.kept[step] = this.kept.get(step, 0) + found.st_size

    def _count_up(self, this: _Pass) -> _Surplus | None:
        """What is too much, by what a pass has counted; None if all has room."""
        total = sum(this.kept.values())
        if not self._settings.size_bytes or total <= self._settings.size_bytes:
            return None
        too_much = total - int(self._settings.size_bytes * KEEP_SHARE)
        for step in sorted(this.kept, reverse=True):
            if this.kept[step] >= too_much:
                break
            too_much -= this.kept[step]
        older_ns = this.now_ns - (step + 1) * STEP_S * 10**9 if step < STEPS else 0
        return _Surplus(older_ns, this.now_ns - step * STEP_S * 10**9 + 1, too_much)


def _open(above: int, name: str) -> int:
    """A folder to list; -1 if there is none."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _fans(base: int) -> list[str]:
    """The fan-out folders that there are."""
    folder = _open(base, "values")
    try:
        return sorted(name for names in _slices(folder) for name in names if _FAN.fullmatch(name))
    finally:
        os.close(folder)


def _slices(folder: int) -> Iterator[list[str]]:
    """The names in a folder, so many at a time."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) == SLICE_FILES:
                yield names
                names = []
    yield names
