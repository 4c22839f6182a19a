"""Threads for work that may block for ever, such as reading an adapter's files from a volume that hangs."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable

from tiercache.ground import forks

MAX_THREADS = 8
MAX_WAITING = 1024
"""Pieces of work with one key."""

logger = logging.getLogger("tiercache.connectors.vllm")


class Apart:
    """Runs work in order for each key, and independently for different keys. Thread-safe.

    A thread lives while it has work. A hung thread delays only its own key; when so many hang that none is left, work
    is refused.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Callable[[], object]]] = {}  # of keys that have a thread
        forks.watch(self, "_lock")

    def forget_in_child(self) -> None:
        """After a fork, in the child, where its threads do not exist."""
        self._waiting.clear()

    def begin(self, key: Hashable, work: Callable[[], object]) -> bool:
        """Have work done soon; returns whether it will be."""
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is None:
                if len(self._waiting) >= MAX_THREADS:
                    return False
                self._waiting[key] = deque([work])
                try:
                    threading.Thread(target=self._run, args=(key,), name=self._name, daemon=True).start()
                except RuntimeError:  # too many threads in this process
                    del self._waiting[key]
                    return False
                return True
            if len(waiting) >= MAX_WAITING:
                return False
            waiting.append(work)
            return True

    def _run(self, key: Hashable) -> None:
        while True:
            with self._lock:
                waiting = self._waiting[key]
                if not waiting:
                    del self._waiting[key]
                    return
                work = waiting.popleft()
            try:
                work()
            except Exception:
                # The engine must go on after any error.
                logger.exception("work in the background failed unexpectedly")
