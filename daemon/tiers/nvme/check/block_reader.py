"""Reads blocks of a closed directory and compares them with their checksums."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from pathlib import Path

from tiercache.daemon.tiers.nvme.catalog.rows import Row, segment_and_slot
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.ground.units import round_up
from tiercache.protocol.checksums import block_checksum, block_seed


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
