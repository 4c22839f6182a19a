"""A server's private daemon: started with it, restarted when it dies or hangs, ended with it."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any

from tiercache.client.launcher import launch
from tiercache.errors import TierCacheError
from tiercache.ground import forks

logger = logging.getLogger(__name__)
_POLL_S = 0.2
_PING_S = 5.0
_MOST_MISSED = 6
"""Unanswered pings in a row (a minute) before the daemon is killed. Counted: this process may have been stopped too."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
# A daemon that has lived this long did not die of its settings.
_LONG_LIFE_S = 60.0
_MAX_RESTARTS = 10


class PrivateDaemon:
    """A launched daemon, and a thread that restarts it. Requests never wait for the daemon; hits return when it does.

    A daemon that does not answer for a minute is killed. Pauses double from one short life to the next; after
    ten short lives the server continues without a cache.
    Takes what `tiercache.launch` takes, and raises what that raises.
    """

    def __init__(self, arena: str, **config: Any) -> None:
        self._daemon = launch(arena, **config)
        self._ending = threading.Event()
        forks.watch(self, "_ending")
        self._thread = threading.Thread(target=self._watch, name="private daemon", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address for `tiercache.connect`; the same after each restart."""
        return self._daemon.address

    @property
    def log(self) -> str:
        return str(self._daemon.log)

    def _watch(self) -> None:
        started_s, short_lives, missed = time.monotonic(), 0, 0
        ping_s = started_s
        while not self._ending.wait(_POLL_S):
            if (status := self._daemon.poll()) is None:
                if time.monotonic() >= ping_s:
                    missed = 0 if self._daemon.answers(_PING_S) else missed + 1
                    ping_s = time.monotonic() + _PING_S
                    self._end_if_hung(missed)
                continue
            short_lives = short_lives + 1 if time.monotonic() - started_s < _LONG_LIFE_S else 1
            if short_lives > _MAX_RESTARTS:
                logger.error("the private daemon ended %d times in a row: no cache, see %s", short_lives, self.log)
                return
            pause_s = min(_FIRST_PAUSE_S * 2 ** (short_lives - 1), _LONGEST_PAUSE_S)
            logger.warning("the private daemon ended with status %d: again in %g s, see %s", status, pause_s, self.log)
            if self._ending.wait(pause_s):
                return
            started_s, missed = time.monotonic(), 0
            self._restart()

    def _end_if_hung(self, missed: int) -> None:
        if missed >= _MOST_MISSED and not self._ending.is_set():
            logger.warning("the private daemon has not answered %d times: it is killed, see %s", missed, self.log)
            self._daemon.kill()

    def _restart(self) -> None:
        try:
            self._daemon.restart()
        except (TierCacheError, OSError) as error:
            if not self._ending.is_set():
                logger.warning("the private daemon is not back: %s", error)
        else:
            logger.info("the private daemon is back")

    def close(self) -> None:
        """End the daemon; waits for its last writes. Idempotent."""
        self._ending.set()
        self._daemon.close()
        self._thread.join()

    def __enter__(self) -> PrivateDaemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
