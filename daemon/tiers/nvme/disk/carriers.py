"""Chooses how blocks of a directory are carried: by Linux AIO where it works, else by threads.

aio      one thread, many transfers under way: less CPU for each block, and for scattered ones by far
threads  a thread for each transfer under way: works everywhere, and encodes blocks on all cores
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .aio import AioCarrier
from .aio_probe import in_words
from .backlog import Backlog, Part
from .directory import Directory
from .threads import ThreadCarrier

THREADS = 8
"""8 for throughput, 4 for the latency of single blocks."""
AIO_DEPTH = 32
"""Runs under way by AIO: enough that several end together, and are handed over together."""

Finished = Callable[[Sequence[Part]], None]


class Carrier(Protocol):
    """Takes parts from a backlog, gives their operations outcomes, and hands them to `finished`, on its own threads."""

    name: str

    def wake(self, count: int) -> None:
        """`count` parts have come, or the backlog is stopping. Needs `backlog.changed` held."""

    def join(self, deadline_s: float) -> bool:
        """Wait until its threads have ended, or until a time (time.monotonic()); True if they have. Blocks."""


def why_threads(nvme_io: str, nvme_codec: str, beside_loop: bool) -> str:
    """Why the settings want threads, in words; empty when they want AIO where it works.

    beside_loop: in the process of the event loop. A thread that releases the interpreter's lock of a busy loop waits
    for it again, some milliseconds each time: of eight threads seven wait meanwhile for the disk, and of one none.
    """
    if nvme_io == "threads":
        return "nvme_io = threads"
    if nvme_io == "auto" and nvme_codec != "raw":
        return f"nvme_codec = {nvme_codec}: threads compress on several cores"
    if nvme_io == "auto" and beside_loop:
        return "nvme_io = auto: threads get on better beside the event loop"
    return ""


def start_carrier(
    directory: Directory, finished: Finished, why_not_aio: str, threads: int, depth: int
) -> tuple[Backlog, Carrier, str]:
    """Start the carrier that suits a directory; also returns why it is not aio, empty if it is.

    why_not_aio: empty, or why it must be threads.
    """
    reason = why_not_aio or directory.aio_reason
    if not reason:
        backlog = Backlog(depth)
        try:
            return backlog, AioCarrier(backlog, directory, finished), ""
        except OSError as error:
            reason = in_words(error)
    backlog = Backlog(threads)
    return backlog, ThreadCarrier(backlog, directory, finished), reason
