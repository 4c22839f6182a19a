"""Copies between buffers that let other threads run meanwhile."""

from __future__ import annotations

import ctypes

from tiercache.daemon.tiers.shared.memory import address_of

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
