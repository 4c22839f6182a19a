"""The helper process of one store, kept running: its lines are to workers, and its problems are those of a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tiercache.daemon.helper_processes.limits import ProcessLimits
from tiercache.daemon.helper_processes.process import HelperProcess, ProcessError, ProcessProblem
from tiercache.daemon.helper_processes.supervisor import Supervisor
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

from . import messages
from .lines import WorkerLine

CHILD = "tiercache.daemon.tiers.shared.stores.helper.child"
STEADY_S = 5.0
"""A process that has lived this long has started well: the next one follows at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_LATE_LINES = 16
"""The most lines that were given up and whose workers are not back: beyond it no line is opened."""
HUNG_S = 10.0
"""The process hangs if a call is so old, and it has answered nothing since or has `MAX_LATE_LINES` late lines."""
MAX_UNDEAD = 4
"""The most killed processes that are still in the kernel: beyond it no other is started."""
SILENT_S = 5.0
"""The process hangs if it answers no ping within this time."""
_REAP_S = 1.0

_STORE_PROBLEMS = {
    ProcessProblem.STARTING: StoreProblem.BUSY,
    ProcessProblem.ENDED: StoreProblem.UNREACHABLE,
    ProcessProblem.HANGS: StoreProblem.UNREACHABLE,
    ProcessProblem.LATE: StoreProblem.TIMEOUT,
    ProcessProblem.NO_RESOURCES: StoreProblem.BUSY,
}


class StoreSupervisor:
    """Keeps the helper process of one store running.

    Attributes:
        processes: does that, for any kind of process.
    """

    def __init__(self, maker: str, url: str, address: str) -> None:
        start = messages.encode(messages.Start(maker, url))
        limits = ProcessLimits(
            FIRST_PAUSE_S,
            LONGEST_PAUSE_S,
            STEADY_S,
            MAX_LATE_LINES,
            HUNG_S,
            max_undead=MAX_UNDEAD,
            silent_s=SILENT_S,
            reap_s=_REAP_S,
        )
        self.processes = Supervisor(CHILD, f"helper process of {address}", lambda: start, limits)

    def begin(self) -> None:
        """Start the process, and keep one running until `close`. Does not block. Raises StoreError."""
        with _problems_of_a_store():
            self.processes.begin()

    def open_line(self, deadline_s: float) -> tuple[HelperProcess, WorkerLine]:
        """A new line. Blocks until the process is ready. Raises StoreError."""
        with _problems_of_a_store():
            process, end = self.processes.open_line(deadline_s)
        return process, WorkerLine(end)

    def give_up(self, process: HelperProcess, line: WorkerLine, began_s: float) -> None:
        """A call that began then was not answered in time: never use its line again. Does not block."""
        self.processes.give_up_line(process, line.let_go(), began_s)

    def stats(self) -> dict[str, object]:
        """Counts and state, as plain values."""
        return self.processes.stats()

    def close(self) -> None:
        """End the process without waiting for it. Lines are lost."""
        self.processes.close()


@contextmanager
def _problems_of_a_store() -> Iterator[None]:
    try:
        yield
    except ProcessError as error:
        raise StoreError(_STORE_PROBLEMS[error.problem], error.text) from None
