"""Memory of this process as bytes that threads fill: frames of the arena, scratch space, and copies between them."""

from __future__ import annotations

import ctypes
import mmap
import threading


def frame_view(address: int, length: int) -> memoryview:
    """The bytes of a frame, writable."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def address_of(view: memoryview) -> int:
    """Where a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Scratch:
    """Page-aligned space that one thread uses again and again; it grows to the largest demand."""

    def __init__(self) -> None:
        self._area: mmap.mmap | None = None

    def get(self, length: int) -> memoryview:
        """A view of that many bytes, with whatever they held before. Valid until the next call."""
        if self._area is None or len(self._area) < length:
            self._area = mmap.mmap(-1, max(mmap.PAGESIZE, length))
        return memoryview(self._area)[:length]


_of_thread = threading.local()


def thread_scratch() -> Scratch:
    """The scratch space of this thread."""
    scratch: Scratch | None = getattr(_of_thread, "scratch", None)
    if scratch is None:
        scratch = _of_thread.scratch = Scratch()
    return scratch


# --- copies ------------------------------------------------------------------------------------------

SMALL_BYTES = 64 << 10
PIECE_BYTES = 256 << 10
"""What cannot be copied without the interpreter's lock is copied in such pieces, between which it may change hands."""


def copy_view(source: memoryview, target: memoryview) -> None:
    """Copy all of `source` to the beginning of `target`. Both are contiguous bytes."""
    size = len(source)
    assert size <= len(target)
    if size > SMALL_BYTES and not source.readonly:
        ctypes.memmove(address_of(target), address_of(source), size)
        return
    for start in range(0, size, PIECE_BYTES):
        piece = source[start : start + PIECE_BYTES]
        target[start : start + len(piece)] = piece
