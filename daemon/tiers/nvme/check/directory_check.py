"""Checks a cache directory without its daemon: compares the index with the disk.

    superblock ─► database ─► segment files ─► rows, one by one ─► chains ─► checksums of blocks

A *finding* is what a crash of a daemon does not leave behind (a power loss may; and a daemon that is killed while it
still loads rows may leave orphans, if it has just dropped a chain, or has another nvme_key than before). The daemon
deletes the row of a block before that of the block before it. What is normal after a crash is a *note*:
flushed blocks whose rows had not been deleted yet, a segment that was made and not used yet. A repair deletes the rows
of findings, and of all blocks behind them, which would be misses anyway; no block becomes readable by it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.nvme.catalog.catalog_check import (
    check_database,
    check_rows,
    is_empty,
    mend,
    read_state,
    set_aside,
)
from tiercache.daemon.tiers.nvme.catalog.rows import PlacedRow
from tiercache.daemon.tiers.nvme.check.block_reader import BlockReader
from tiercache.daemon.tiers.nvme.check.chains import BAD, FLUSHED, UNKNOWN, Chains
from tiercache.daemon.tiers.nvme.check.findings import Findings, Report, where
from tiercache.daemon.tiers.nvme.check.tables import Tables
from tiercache.daemon.tiers.nvme.disk.directory import DATABASE_NAME, holds_data
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.daemon.tiers.nvme.disk.lock import LockedBy, take_lock
from tiercache.daemon.tiers.nvme.disk.segment_files import segment_id
from tiercache.daemon.tiers.nvme.disk.superblock import DamagedSuperblock, NewerSuperblock, Superblock, read_superblock
from tiercache.errors import CatalogUnavailable, ConfigError
from tiercache.ground.units import round_up

DEFAULT_SAMPLE = 1000
DEFAULT_RATE = 200 << 20
ALL = -1
"""As a sample: every block."""

Progress = Callable[[str, int, int], None]
"""What is being checked, how far, and how many there are (0: not known)."""


def check_directory(
    path: Path,
    sample: int = DEFAULT_SAMPLE,
    rate: int = DEFAULT_RATE,
    repair: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Check one directory that no daemon uses; it is locked meanwhile.

    Args:
        sample: blocks whose bytes are read and compared with their checksum, chosen at random; ALL or 0.
        rate: bytes a second to read for that; 0 is unlimited.
        repair: delete what is wrong. Without it nothing is changed.

    Blocks: about 5 us a row, and the reading. Takes 200 bytes of memory a row.

    Raises ConfigError, in one line, when it is no cache directory, a daemon uses it, a newer version
    has made it, or it cannot be read.
    """
    try:
        if not holds_data(path):
            raise ConfigError(f"{path} is no nvme directory of tiercache: name one, or leave it out")
        lock_fd = take_lock(path)
    except LockedBy as holder:
        raise ConfigError(
            f"a daemon (pid {holder}) uses nvme directory {path}: stop it, or check it while it runs "
            "with `tiercache check --address` and its run directory"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"nvme directory {path} cannot be checked ({error.strerror}): see that it is there and can be written"
        ) from error
    try:
        return _Check(path, progress).run(sample, rate, repair)
    except OSError as error:
        raise ConfigError(f"nvme directory {path} cannot be checked: {error}") from error
    finally:
        os.close(lock_fd)


class _Check:
    """One check of one directory, by a single thread; may block anywhere."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self.path = path
        self.report = Report(path)
        self._progress = progress
        self._findings = Findings()
        self._files: dict[int, int] = {}  # bytes by segment
        self._geometry = Superblock(b"", 0, 0)
        self._tables: Tables  # from the time that the database was read
        self._chains = Chains()
        self._damaged: list[int] = []  # places

    def run(self, sample: int, rate: int, repair: bool) -> Report:
        """See `check_directory`."""
        report = self.report
        try:
            readable = self._read_superblock() and self._read_state()
            if readable:
                self._check_segments()
                self._read_rows()
                self._link_rows()
                self._scan(sample, rate)
        except CatalogUnavailable as error:  # rows that SQLite could not read to the end
            readable = False
            self._findings.add("database", f"{error}: every block here is lost")
        report.findings = self._findings.lines()
        if repair and report.findings and self._geometry.segment_bytes:
            self._repair(readable)
        return report

    # --- what comes before rows ------------------------------------------------------------------

    def _read_superblock(self) -> bool:
        found = None
        why = "there is none"
        try:
            found = read_superblock(self.path)
        except DamagedSuperblock as error:
            why = str(error)
        except NewerSuperblock as error:
            raise ConfigError(
                f"nvme directory {self.path} was made by a newer tiercache ({error}): check it with that one"
            ) from None
        if found is None:
            self._findings.add(
                "superblock", f"superblock: {why}; the next daemon puts the content aside and starts empty"
            )
            return False
        self._geometry = found
        return True

    def _read_state(self) -> bool:
        """Read the small tables; False when no row can be trusted."""
        if is_empty(self.path):
            if any((self.path / "segments").glob("*.seg")):
                self._findings.add("database", f"{DATABASE_NAME}: there is none, so the segments' blocks are lost")
            return False
        try:
            state = read_state(self.path, self._geometry.directory_id)
        except CatalogUnavailable as error:
            self._findings.add("database", f"{error}: every block here is lost")
            return False
        self._progress("database", 0, 0)
        problems = check_database(self.path)
        for problem in problems:
            self._findings.add("database", f"{DATABASE_NAME}: {problem}")
        self._tables = Tables(state, self._geometry.segment_bytes)
        return not problems

    def _check_segments(self) -> None:
        size_bytes = self._geometry.segment_bytes
        folder = self.path / "segments"
        for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
            number = segment_id(name)
            if number is None:
                self.report.notes.append(f"segments/{name} is none of ours, left alone")
                continue
            self._files[number] = (folder / name).lstat().st_size
            if number not in self._tables.segments:
                whole = self._files[number] == size_bytes
                what = "not in use yet" if whole else "not made to its end, the next daemon removes it"
                self.report.notes.append(f"segment {number}: {what}")
        for number, slot_bytes in self._tables.segments.items():
            if self._files.get(number) != size_bytes:
                has = f"has {self._files[number]} bytes, not {size_bytes}" if number in self._files else "has no file"
            elif slot_bytes <= 0 or slot_bytes % PAGE_BYTES or slot_bytes > size_bytes:
                has = f"is divided into slots of {slot_bytes} bytes"
            else:
                continue
            self._tables.lost_segments.append(number)
            self._findings.add("segments", f"segment {number} {has}: its blocks are lost")

    # --- rows ------------------------------------------------------------------------------------

    def _read_rows(self) -> None:
        """Check every row by itself, and add the readable ones to the chains."""
        highest = 0
        for place, row in check_rows(self.path):
            self.report.rows += 1
            if self.report.rows % 65_536 == 0:
                self._progress("rows", self.report.rows, 0)
            if row is None:
                self._damaged.append(place)
                self._findings.add("damaged rows", f"{where(place)}: the row is damaged")
                continue
            highest = max(highest, row.sequence)
            state = UNKNOWN
            if (problem := self._tables.problem(place, row)) is not None:
                state = BAD
                self._findings.add(problem[0], f"{where(place)}: {problem[1]}")
            elif self._tables.is_flushed(row):
                state = FLUSHED
            if (other := self._chains.add(place, row, state)) is not None:
                twice = f"block {row.key.hex()} is also in {where(other)}"
                self._findings.add("blocks in two slots", f"{where(place)}: {twice}")
        if highest > self._tables.sequence:
            text = f"{self._tables.sequence} insertions are counted, a row has number {highest}"
            self._findings.add("counters", f"{DATABASE_NAME}: {text}")
            self._tables.sequence = highest

    def _readable_rows(self) -> Iterator[PlacedRow]:
        return ((place, row) for place, row in check_rows(self.path) if row is not None)

    def _link_rows(self) -> None:
        self._chains.link(self._readable_rows(), self._tables.flushed_before)
        for place in self._chains.orphans():
            self._findings.add("rows without a parent", f"{where(place)}: the block before it is not here")
        if flushed := self._chains.flushed_count:
            self.report.notes.append(f"{flushed:,} flushed blocks whose rows the next daemon removes")

    # --- bytes -----------------------------------------------------------------------------------

    def _scan(self, sample: int, rate: int) -> None:
        """Read blocks and compare them with their checksums."""
        good = self._chains.good_count
        total = good if sample == ALL else min(sample, good)
        if total == 0:
            return
        bad: list[int] = []
        unreadable_codecs: dict[str, int] = {}
        with closing(BlockReader(self.path)) as reader:
            started_s = time.monotonic()
            for number, place, row in self._chains.good(self._readable_rows(), total):
                problem = reader.problem(place, row, self._tables.fingerprint(row.namespace))
                if problem:
                    bad.append(number)
                    self._findings.add("bad blocks", f"{where(place)}: {problem}")
                elif row.codec != codecs.RAW and not _has_library(row.codec):
                    name = codecs.codec_name(row.codec)
                    unreadable_codecs[name] = unreadable_codecs.get(name, 0) + 1
                self.report.scanned_blocks += 1
                self.report.scanned_bytes += round_up(row.stored_length, PAGE_BYTES)
                self._progress("blocks", self.report.scanned_blocks, total)
                if rate:
                    due_s = started_s + self.report.scanned_bytes / rate
                    time.sleep(max(0.0, due_s - time.monotonic()))
        for name, count in unreadable_codecs.items():
            self.report.notes.append(f"{count:,} blocks are stored with {name}, whose library is not installed")
        if bad:
            self._chains.spoil(bad)

    # --- repairing -------------------------------------------------------------------------------

    def _repair(self, readable: bool) -> None:
        if not readable:
            if not is_empty(self.path):
                kept = set_aside(self.path)
                what = "deleted, the disk is full" if kept is None else f"set aside as {kept.name}"
                self.report.notes.append(f"the database is {what}; the directory starts empty")
            for name in os.listdir(self.path / "segments") if (self.path / "segments").is_dir() else []:
                if segment_id(name) is not None:
                    (self.path / "segments" / name).unlink()
            return
        gone = [*self._damaged, *self._chains.lost()]
        mend(self.path, gone, self._tables.lost_segments, self._tables.sequence)
        self.report.deleted_rows = len(gone)
        for number in self._tables.lost_segments:
            if self._files.get(number, self._geometry.segment_bytes) != self._geometry.segment_bytes:
                (self.path / "segments" / f"{number:08d}.seg").unlink()


def _has_library(codec: int) -> bool:
    try:
        codecs.codec_number(codecs.codec_name(codec))
    except ConfigError:
        return False
    return True
