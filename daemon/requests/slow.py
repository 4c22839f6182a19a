"""Slow requests: a log line for each, with what it was about, and a count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.ground.logs import fields
from tiercache.protocol.messages import KEY_BYTES, AnyRequest

from .sessions import Session

log = logging.getLogger("tiercache.daemon")


class SlowRequests:
    """Is told of every request and logs those over `threshold_s`; 0 turns it off. Event loop only.

    The time a request queued is not recorded, but since when the queue has not been empty is: it cannot have waited
    longer than that. The loop checks at every tick, so a threshold near 10 ms says little.
    """

    def __init__(self, threshold_s: float, counters: Counters) -> None:
        self._threshold_ns = int(threshold_s * 1e9) or 1 << 62
        self._counters = counters
        self.queue_empty_ns: Callable[[], int] = time.perf_counter_ns

    def served(self, session: Session, request: AnyRequest, started_ns: int, ended_ns: int) -> None:
        """A request was answered, or deferred; both times are of `perf_counter_ns`."""
        empty_ns = self.queue_empty_ns()
        if ended_ns - empty_ns <= self._threshold_ns:
            return
        self._counters.requests_slow += 1
        work_ms, queue_ms = (ended_ns - started_ns) / 1e6, max(0, started_ns - empty_ns) / 1e6
        what = f"{work_ms:.1f} ms of work after up to {queue_ms:.1f} ms in the queue"
        self._say(session, request, what, work_ms=work_ms, queue_ms=queue_ms)

    def answered_late(self, session: Session, request: AnyRequest, waited_s: float) -> None:
        """A request that waited for the tier below has been answered."""
        if waited_s * 1e9 > self._threshold_ns:
            self._counters.requests_slow += 1
            self._say(session, request, f"{waited_s * 1e3:.1f} ms for blocks on their way up", below_ms=waited_s * 1e3)

    def _say(self, session: Session, request: AnyRequest, what: str, **times_ms: float) -> None:
        kind, keys = type(request).__name__, len(getattr(request, "keys", b"")) // KEY_BYTES
        of = f" of {keys} keys" if keys else ""
        rounded = {key: round(value, 3) for key, value in times_ms.items()}
        more = fields(event="slow_request", request=kind, client=session.name, pid=session.pid, keys=keys, **rounded)
        log.info("slow request: %s%s for %s took %s", kind, of, session.name, what, **more)
