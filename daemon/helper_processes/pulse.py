"""Whether a process still answers: its control thread is pinged, and hangs with nothing but the process as a whole.

That thread waits for no disk and no network. So if it is silent, the process is stopped, or native code in it does not
let go of the interpreter's lock.
"""

from __future__ import annotations

import math
import time

from tiercache.daemon.helper_processes.process import HelperProcess

PING_S = 1.0


class Pulse:
    """Of one process, once it is ready: until then it may take as long as its owner allows.

    Silence is counted in pings and not by the clock: when this process was stopped itself, both ends have missed that
    time. `silent_s`: for so long it may say nothing; infinite: it is not asked.
    """

    def __init__(self, its: HelperProcess, silent_s: float) -> None:
        self._its = its
        self._silent_s = silent_s
        self._pinged = False
        self._missed = 0
        self._next_s = time.monotonic() + PING_S

    @property
    def wait_s(self) -> float | None:
        """Until `beats` is to be asked again; None: it need not be."""
        return None if math.isinf(self._silent_s) else max(0.0, self._next_s - time.monotonic())

    def heard(self) -> None:
        """It has said something."""
        self._pinged, self._missed = False, 0

    def beats(self) -> bool:
        """Ping it where that is due; False if it has been silent for too long."""
        now_s = time.monotonic()
        if self.wait_s is None or now_s < self._next_s:
            return True
        self._next_s = now_s + PING_S
        if self._pinged:
            self._missed += 1
            return self._missed * PING_S < self._silent_s
        self._pinged = self._its.ready and self._its.ping()
        return True
