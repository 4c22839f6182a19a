"""Page-aligned memory for blocks that do not move straight between their frames and the disk."""

from __future__ import annotations

import ctypes
import mmap
from typing import NamedTuple

BOUNCE_BYTES = 32 << 20
"""What all buffers of a directory may take together, or one larger buffer alone."""
_LEAST_BYTES = 64 << 10


class Buffer(NamedTuple):
    """Memory at a page."""

    address: int
    memory: mmap.mmap


class BouncePool:
    """Buffers that are used again. For one thread."""

    def __init__(self, limit_bytes: int = BOUNCE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._free: list[Buffer] = []
        self.used_bytes = 0
        """Bytes of the buffers that were taken and not given back."""

    def has_room(self, size_bytes: int) -> bool:
        """Whether such a buffer may be taken now."""
        return self.used_bytes == 0 or self.used_bytes + _rounded(size_bytes) <= self._limit_bytes

    def take(self, size_bytes: int) -> Buffer:
        """A buffer of at least so many bytes, with anything in it. Ask `has_room` first."""
        wanted_bytes = _rounded(size_bytes)
        found = next((buffer for buffer in self._free if len(buffer.memory) == wanted_bytes), None)
        if found is not None:
            self._free.remove(found)
        else:
            memory = mmap.mmap(-1, wanted_bytes)
            found = Buffer(ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory)
        self.used_bytes += wanted_bytes
        return found

    def give_back(self, buffer: Buffer) -> None:
        """The buffer is free; the kernel does not use it any more."""
        self.used_bytes -= len(buffer.memory)
        self._free.append(buffer)
        while self.used_bytes + sum(len(one.memory) for one in self._free) > self._limit_bytes:
            self._free.pop(0)


def _rounded(size_bytes: int) -> int:
    """Powers of two, so that blocks of about the same size share buffers."""
    return max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
