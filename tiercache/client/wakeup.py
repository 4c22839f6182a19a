"""Wakes a thread that waits for a descriptor. Signal handlers may use it."""

from __future__ import annotations

import os
import select
import threading

from tiercache.ground import forks


class Wakeup:
    """What one thread waits for beside a socket, and every other thread sets. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may set it while this thread has it
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        forks.watch(self, "_lock")

    def set(self) -> None:
        """End the present wait, or the next one."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def wait(self, fd: int | None, seconds: float) -> bool:
        """Wait until `fd` is readable, for `seconds` at most or until `set`; returns whether `fd` is.

        Returns at once when this is closed.
        """
        if (own := self._fd) < 0:
            return False
        poll = select.poll()
        poll.register(own, select.POLLIN)
        if fd is not None:
            poll.register(fd, select.POLLIN)
        ready = {readable for readable, _ in poll.poll(max(1, int(seconds * 1000)))}
        if own in ready and self._fd == own:
            try:
                os.eventfd_read(own)
            except BlockingIOError:
                return False  # another wait has read it
        return bool(ready - {own})

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        with self._lock:
            # Cleared before it is closed: a signal handler in between would write to the number's next owner.
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def forget_in_child(self) -> None:
        """After a fork, in the child: the counter is the parent's too."""
        self.close()
