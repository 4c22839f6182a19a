"""The daemon's end of a line to a worker of the helper process, and the staging buffer that they share."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Sequence

import msgspec

from tiercache.daemon.tiers.shared.memory import copy_view
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem
from tiercache.ground.units import round_up

from . import messages

STAGING_BYTES = 16 << 20
"""The buffer of one line, unless two values need more."""
MAX_SLOTS, MIN_SLOTS = 8, 2
_ALIGNMENT_BYTES = 64 << 10
"""Where slots begin: at a page, however large a machine's pages are, for direct I/O."""


class LineLost(Exception):
    """The worker's process is gone or answers nonsense, or the line was closed."""


class WorkerLine:
    """One worker. A line on which a call was late is given up for good (`StoreSupervisor.give_up`).

    The worker may write to the buffer at any time, so what is copied out of it may be any bytes, as from any store.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._staging = memoryview(b"")
        self.slots = 0
        self.slot_bytes = 0

    def send(self, asked: messages.Asked, deadline_s: float, fds: Sequence[int] = ()) -> None:
        """Raises LineLost, and StoreError (TIMEOUT)."""
        self._wait_until(deadline_s)
        try:
            if fds:
                socket.send_fds(self._end, [messages.encode(asked)], fds)
            else:
                self._end.send(messages.encode(asked))
        except TimeoutError:
            raise _late() from None
        except OSError:
            raise LineLost from None

    def receive(self, deadline_s: float) -> messages.Answered:
        """The next answer. Raises LineLost, and StoreError (TIMEOUT)."""
        self._wait_until(deadline_s)
        try:
            packet = self._end.recv(messages.MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise _late() from None
        except OSError:
            raise LineLost from None
        if not packet:
            raise LineLost
        try:
            answer: messages.Answered = messages.decode_answered(packet)
        except msgspec.MsgspecError:
            raise LineLost from None
        return answer

    def _wait_until(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise _late()
        self._end.settimeout(left_s)

    # --- the staging buffer ----------------------------------------------------------------------

    def make_room(self, value_bytes: int, deadline_s: float) -> None:
        """Have slots of at least that size. Only while no call is under way."""
        if value_bytes <= self.slot_bytes:
            return
        slot_bytes = round_up(value_bytes, _ALIGNMENT_BYTES)
        slots = min(max(STAGING_BYTES // slot_bytes, MIN_SLOTS), MAX_SLOTS)
        try:
            fd = os.memfd_create("tiercache-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _no_buffer(error) from None
        try:
            # All of it now, and its size for good: neither want of memory nor the process can make an access fault.
            os.posix_fallocate(fd, 0, slots * slot_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.send(messages.Staging(slots, slot_bytes), deadline_s, [fd])
            self._staging = memoryview(mmap.mmap(fd, slots * slot_bytes))
        except OSError as error:
            raise _no_buffer(error) from None
        finally:
            os.close(fd)
        self.slots, self.slot_bytes = slots, slot_bytes

    def fill(self, slot: int, parts: Sequence[memoryview | bytes]) -> int:
        """Copy a value into a slot; its length."""
        start = slot * self.slot_bytes
        at = start
        for part in parts:
            copy_view(memoryview(part).cast("B"), self._staging[at : start + self.slot_bytes])
            at += len(part)
        return at - start

    def empty(self, slot: int, views: Sequence[memoryview]) -> None:
        """Copy the first bytes of a slot."""
        at = slot * self.slot_bytes
        for view in views:
            copy_view(self._staging[at : at + len(view)], view)
            at += len(view)

    # --- the end ---------------------------------------------------------------------------------

    def let_go(self) -> socket.socket:
        """Our end of a line that is given up. The worker ends once it is back, and has the buffer for itself alone."""
        self._staging = memoryview(b"")
        return self._end

    def interrupt(self) -> None:
        """End a call of another thread, with LineLost."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()
        self._staging = memoryview(b"")


def _no_buffer(error: OSError) -> StoreError:
    return StoreError(StoreProblem.BUSY, f"no staging buffer for the helper process: {error.strerror}")


def _late() -> StoreError:
    return StoreError(StoreProblem.TIMEOUT, "its helper process did not answer in time")
