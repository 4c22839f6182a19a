"""Linux AIO by its system calls: transfers that are under way while their thread goes on (`man 2 io_submit`).

    ready(place, ...) ─► iocb of that place ─┐
    ready(place, ...) ─► iocb of that place ─┴► submit: one io_submit ─► kernel ─► eventfd + results: (place, bytes)

By ctypes: glibc has no functions for these calls, and libaio is not part of most images. `io_uring` would do more, but
containers often forbid it. Where a file is not open for direct I/O, the kernel does all of the work within io_submit.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Of io_setup, io_destroy, io_getevents and io_submit, by machine."""
_PREADV, _PWRITEV = 7, 8
_TELL_EVENTFD = 1
_IOCB = struct.Struct("<QIIHhIQQqQII")
"""data, key, rw_flags, opcode, priority, fd, address of iovecs, their number, offset, reserved, flags, eventfd."""
_IOVEC_BYTES = 16
_EVENT = struct.Struct("<QQqq")
"""data, address of the iocb, result, second result."""

TOGETHER_NS = 200_000
"""How long the first of several results may wait for the others."""

_releasing = ctypes.CDLL(None, use_errno=True).syscall
_releasing.restype = ctypes.c_long
_holding = ctypes.PyDLL(None, use_errno=True).syscall
"""Does not release the interpreter's lock: for calls that never block, whose lock might take milliseconds to get."""
_holding.restype = ctypes.c_long

_open: set[AioContext] = set()
"""Keeps the memory that the kernel may read or write, whatever becomes of its owner."""


class AioContext:
    """One context of the kernel's, for up to `depth` transfers at a time. For one thread.

    Each transfer has a place, 0 ..< depth, from `ready` until `results` has returned it. Its memory must stay until
    then.

    Args:
        depth: places.
        eventfd: is written to for each transfer that has ended.
        most_pieces: pieces of memory that one transfer may have.
    """

    def __init__(self, depth: int, eventfd: int, most_pieces: int) -> None:
        """Raises OSError: ENOSYS without AIO or on an unknown machine, EAGAIN beyond fs.aio-max-nr."""
        numbers = _NUMBERS.get(os.uname().machine)
        if numbers is None:
            raise OSError(38, f"the numbers of its calls on {os.uname().machine} are not known")
        setup, self._destroy, self._getevents, self._submit = (ctypes.c_long(number) for number in numbers)
        self._eventfd = eventfd
        self._depth, self._most_pieces = depth, most_pieces
        self._iocbs = ctypes.create_string_buffer(_IOCB.size * depth)
        self._iovecs = ctypes.create_string_buffer(_IOVEC_BYTES * most_pieces * depth)
        self._pointers = (ctypes.c_uint64 * depth)()
        self._events = ctypes.create_string_buffer(_EVENT.size * depth)
        self._together = (ctypes.c_long * 2)(0, TOGETHER_NS)  # a timespec
        self._first_iocb, self._first_iovec = ctypes.addressof(self._iocbs), ctypes.addressof(self._iovecs)
        context = ctypes.c_ulong(0)
        _call(_holding, setup, ctypes.c_long(depth), ctypes.byref(context))
        self._context = context
        self.flying = 0
        """Transfers that were submitted and whose results have not been returned."""
        _open.add(self)

    def ready(self, place: int, writes: bool, fd: int, pieces: Sequence[tuple[int, int]], offset: int) -> None:
        """Describe the transfer of a place: pieces of memory (address, bytes), in order, from `offset` of a file on."""
        assert 0 < len(pieces) <= self._most_pieces
        flat = [number for piece in pieces for number in piece]
        at = _IOVEC_BYTES * self._most_pieces * place
        struct.pack_into(f"<{len(flat)}Q", self._iovecs, at, *flat)
        _IOCB.pack_into(
            self._iocbs,
            _IOCB.size * place,
            place,
            0,
            0,
            _PWRITEV if writes else _PREADV,
            0,
            fd,
            self._first_iovec + at,
            len(pieces),
            offset,
            0,
            _TELL_EVENTFD,
            self._eventfd,
        )

    def submit(self, places: Sequence[int]) -> int:
        """Begin the transfers of these places; returns how many of them, from the first on, the kernel has taken.

        Raises OSError when it did not take the first: EAGAIN for want of room. May block: some file systems allocate
        here, and a frozen one waits.
        """
        for number, place in enumerate(places):
            self._pointers[number] = self._first_iocb + _IOCB.size * place
        taken = _call(_releasing, self._submit, self._context, ctypes.c_long(len(places)), self._pointers)
        self.flying += taken
        return taken

    def results(self, least: int = 0) -> list[tuple[int, int]]:
        """Place and result of the transfers that have ended: bytes moved, or a negative errno.

        Waits for `least` of them, up to TOGETHER_NS; does not block for 0.
        """
        if not self.flying:
            return []
        count = _call(
            _releasing if least else _holding,
            self._getevents,
            self._context,
            ctypes.c_long(least),
            ctypes.c_long(self._depth),
            self._events,
            self._together if least else None,
        )
        self.flying -= count
        found = _EVENT.iter_unpack(memoryview(self._events)[: count * _EVENT.size])
        return [(place, result) for place, _, result, _ in found]

    def close(self) -> None:
        """Give it back. Nothing may be under way: the kernel would wait for it, as long as that takes."""
        assert not self.flying, "the kernel still uses this memory"
        _call(_releasing, self._destroy, self._context)
        _open.discard(self)


def _call(function: ctypes._NamedFuncPointer, *arguments: object) -> int:
    result: int = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
