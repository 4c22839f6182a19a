"""Checks a cache directory without its daemon: compares the index with the disk.

    superblock ─► database ─► segment files ─► rows, one by one ─► chains ─► checksums of blocks

A *finding* is what a crash of a daemon does not leave behind (a power loss may; and a daemon that is killed while it
still loads rows may leave orphans, if it has just dropped a chain, or has another nvme_key than before). The daemon
deletes the row of a block before that of the block before it. What is normal after a crash is a *note*:
flushed blocks whose rows had not been deleted yet, a segment that was made and not used yet. A repair deletes the rows
of findings, and of all blocks behind them, which would be misses anyway; no block becomes readable by it.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.forms.cipher import sealed_bytes
from tiercache.daemon.tiers.nvme.catalog.catalog_check import (
    check_database,
    check_rows,
    is_empty,
    read_state,
    repair,
    set_aside,
)
from tiercache.daemon.tiers.nvme.catalog.database import CatalogState
from tiercache.daemon.tiers.nvme.catalog.rows import ROOT_KEY, PlacedRow, Row, segment_and_slot
from tiercache.daemon.tiers.nvme.disk.block_io import plausible_length
from tiercache.daemon.tiers.nvme.disk.directory import DATABASE_NAME, holds_data
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.daemon.tiers.nvme.disk.lock import LockedBy, take_lock
from tiercache.daemon.tiers.nvme.disk.segment_files import segment_id
from tiercache.daemon.tiers.nvme.disk.superblock import DamagedSuperblock, NewerSuperblock, Superblock, read_superblock
from tiercache.errors import CatalogUnavailable, ConfigError
from tiercache.ground.units import round_up
from tiercache.protocol.checksums import KINDS, block_checksum, block_seed
from tiercache.protocol.namespaces import NamespaceSpec

from .findings import Findings, Report, where

DEFAULT_SAMPLE = 1000
DEFAULT_RATE = 200 << 20
ALL = -1
"""As a sample: every block."""

Progress = Callable[[str, int, int], None]
"""What is being checked, how far, and how many there are (0: not known)."""


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


class Tables:
    """Namespaces, tombstones and segments, as the database has them."""

    def __init__(self, state: CatalogState, segment_bytes: int) -> None:
        self.segments = dict(state.segments)
        self.lost_segments: list[int] = []
        """Segments whose blocks are lost, as the check of the files has found."""
        self.sequence = state.next_sequence - 1
        self._segment_bytes = segment_bytes
        self._namespaces: dict[int, tuple[NamespaceSpec, int]] = {}  # spec and oldest epoch by number
        for saved in state.namespaces:
            try:
                spec = msgspec.msgpack.decode(saved.spec, type=NamespaceSpec)
            except msgspec.MsgspecError:
                continue  # its rows are those of an unknown namespace
            if spec.problem() is None and spec.fingerprint() == saved.fingerprint:
                self._namespaces[saved.number] = spec, saved.epoch
        self._tombstones = {(stone.namespace, stone.key): stone.epoch for stone in state.tombstones}

    def fingerprint(self, namespace: int) -> str:
        """That of a known namespace."""
        return self._namespaces[namespace][0].fingerprint()

    def flushed_before(self, namespace: int, key: bytes) -> int:
        """The epoch of the last flush of this block by its key; 0 without one."""
        return self._tombstones.get((namespace, key), 0)

    def is_flushed(self, row: Row) -> bool:
        """True if the block of a row in a known namespace was flushed."""
        return row.epoch < max(self._namespaces[row.namespace][1], self.flushed_before(row.namespace, row.key))

    def problem(self, place: int, row: Row) -> tuple[str, str] | None:
        """What cannot be true of a row, as a kind and in words."""
        return self._problem_of_place(place) or self._problem_of_content(place, row)

    def _problem_of_place(self, place: int) -> tuple[str, str] | None:
        segment, slot = segment_and_slot(place)
        slot_bytes = self.segments.get(segment)
        if place < 0 or slot_bytes is None or segment in self.lost_segments:
            return "rows outside segments", f"there is no segment {segment} in which it could be"
        offset = slot * PAGE_BYTES
        if offset % slot_bytes:
            return "overlapping rows", f"offset {offset} is not a slot of {slot_bytes} bytes, so it overlaps others"
        if offset + slot_bytes > self._segment_bytes:
            return "rows outside segments", f"its slot at {offset} ends behind the segment"
        return None

    def _problem_of_content(self, place: int, row: Row) -> tuple[str, str] | None:
        known = self._namespaces.get(row.namespace)
        if known is None:
            return "unknown namespaces", f"namespace {row.namespace} is not known"
        spec, _ = known
        slot_bytes = self.segments[segment_and_slot(place)[0]]
        needed = sealed_bytes(spec.frame_bytes, spec.block_bytes) if row.codec & codecs.SEALED else spec.frame_bytes
        if slot_bytes not in (needed, sealed_bytes(spec.frame_bytes, spec.block_bytes)):
            wanted = f"blocks of its namespace need slots of {needed} bytes, these have {slot_bytes}"
            return "wrong slot sizes", wanted
        if row.length != spec.block_bytes:
            return "wrong lengths", f"{row.length} bytes, blocks of its namespace have {spec.block_bytes}"
        if spec.window_blocks and row.parent != ROOT_KEY:
            return "chains of windows", "a block of a windowed namespace names a block before it"
        if row.kind not in KINDS or not codecs.known(row.codec):
            return "unknown forms", f"codec {row.codec} or checksum kind {row.kind} is not known"
        if not plausible_length(row.codec, row.stored_length, row.length):
            return "wrong lengths", f"{row.stored_length} bytes are stored of a block of {row.length}"
        return None


class BlockReader:
    """Reads blocks of a closed directory, bypassing the page cache where possible. Blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._area = mmap.mmap(-1, PAGE_BYTES)
        self._segment = -1
        self._files = ExitStack()
        self._fd = -1

    def close(self) -> None:
        self._files.close()

    def problem(self, place: int, row: Row, fingerprint: str) -> str:
        """What is wrong with a block's bytes; empty when they are right."""
        segment, slot = segment_and_slot(place)
        size = round_up(row.stored_length, PAGE_BYTES)
        if len(self._area) < size:
            self._area = mmap.mmap(-1, size)
        view = memoryview(self._area)[:size]
        try:
            if segment != self._segment:
                self._open(segment)
            done = 0
            while done < size:
                count = os.preadv(self._fd, [view[done:]], slot * PAGE_BYTES + done)
                if count == 0:
                    return f"the segment ends {size - done} bytes too early"
                done += count
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        seed = block_seed(row.key, fingerprint, row.length, row.codec, row.kind)
        if block_checksum(view[: row.stored_length], seed, row.kind) != row.checksum:
            return f"the bytes of block {row.key.hex()} fail their checksum"
        return ""

    def _open(self, segment: int) -> None:
        self._files.close()
        path = self._path / "segments" / f"{segment:08d}.seg"
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            self._fd = os.open(path, flags)
        self._files.callback(os.close, self._fd)
        self._segment = segment


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

    Raises ConfigError, in one line, when it is not a cache directory, a daemon uses it, a newer version
    has made it, or it cannot be read.
    """
    try:
        if not holds_data(path):
            raise ConfigError(f"{path} is not an nvme directory of tiercache: name one, or leave it out")
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
            text = f"{where(place)}: the block before it is not here: the next start drops it"
            self._findings.add("rows without a parent", text)
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
        repair(self.path, gone, self._tables.lost_segments, self._tables.sequence)
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
