"""Mooncake's client in the helper process: one for all connections."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from typing import Any

from tiercache.daemon.tiers.shared.stores.mooncake import codes
from tiercache.daemon.tiers.shared.stores.mooncake.settings import MooncakeSettings
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

log = logging.getLogger("tiercache.daemon")

REACH_S = 2.0
LOOK_EVERY_S = 5.0
AGAIN_S = 0.5
LONGEST_PAUSE_S = 5.0
HOPELESS_S = 30.0
"""Calls fail for so long although the master is reached: another process may do better."""
LOG_LINES, LOG_WINDOW_S = 3, 60.0
PROBE = "tiercache-probe"
ENDED = 3
"""Status of the process that gives up."""
_ENVIRONMENT = {
    # By default it tries for 90 s, and no other thread of the process gets on meanwhile.
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}


class MooncakeClient:
    """Starts the client, and starts it again while there is no master. `run` is a thread; the rest any thread's."""

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._native: Any = None
        self._problem: StoreError | None = None
        self._looks = False

    def use(self, deadline_s: float) -> Any:
        """Mooncake's client, once it has started. Raises StoreError, at once if the master is known to be away."""
        with self._changed:
            while self._native is None or self._problem is not None:
                if self._problem is not None:
                    raise StoreError(self._problem.problem, self._problem.text)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise StoreError(StoreProblem.BUSY, "Mooncake's client is starting")
                self._changed.wait(left_s)
            return self._native

    def failed(self, error: StoreError, code: int) -> None:
        """A call has failed. If the master was not reached, calls fail at once until it answers again."""
        if codes.is_of_master(code):
            with self._changed:
                self._problem = error
                self._looks = True
                self._changed.notify_all()

    def run(self) -> None:
        """Never returns."""
        pause_s = 0.0
        while self._native is None:
            problem = self._start()
            if problem is not None:
                self._tell(problem)
                pause_s = min(max(pause_s * 2, AGAIN_S), LONGEST_PAUSE_S)
                time.sleep(pause_s * random.uniform(0.7, 1.3))
        failing_s: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._looks, LOOK_EVERY_S)
                self._looks = False
            code = self._native.is_exist(PROBE)
            if code >= 0:
                failing_s = None
                self._tell(None)
                continue
            now_s = time.monotonic()
            failing_s = now_s if failing_s is None else failing_s
            self._tell(codes.failure(code))
            if now_s - failing_s > HOPELESS_S and self._reach() is None:
                log.error("Mooncake's client fails with code %d although its master is there", code)
                os._exit(ENDED)  # the daemon starts another process
            time.sleep(AGAIN_S)
            with self._changed:
                self._looks = True

    def _tell(self, problem: StoreError | None) -> None:
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def _start(self) -> StoreError | None:
        """Try once to start the client; returns what was in its way."""
        its = self._settings
        try:
            # Mooncake's own try would stop every thread of this process until it ends.
            own = self._reach()
        except OSError as error:
            where = f"{its.master}:{its.port}"
            return StoreError(StoreProblem.UNREACHABLE, f"no master at {where}: {error.strerror or error}")
        from mooncake.store import MooncakeDistributedStore

        native = MooncakeDistributedStore()
        where = f"{its.master}:{its.port}"
        code = native.setup(
            its.host or own, its.metadata, its.segment_bytes, its.buffer_bytes, its.protocol, its.device, where
        )
        if code == 0:
            with self._changed:
                self._native, self._problem = native, None
                self._changed.notify_all()
            return None
        return StoreError(StoreProblem.UNREACHABLE, _no_setup(code, its))

    def _reach(self) -> str:
        """Connect to the master; this host's address on the way there. Raises OSError."""
        with socket.create_connection((self._settings.master, self._settings.port), REACH_S) as line:
            own: str = line.getsockname()[0]
            return own


def prepare_process() -> None:
    """What Mooncake reads when it is imported. The operator's settings stay, but for one that is unsafe here."""
    for name, text in _ENVIRONMENT.items():
        os.environ.setdefault(name, text)
    # Notes must come from the store: one from before a flush, out of a cache of this host, would undo the flush here.
    os.environ.pop("MC_STORE_LOCAL_HOT_CACHE_SIZE", None)
    if "MC_LOG_LEVEL" not in os.environ:
        os.environ["MC_LOG_LEVEL"] = "ERROR"
        _tame_stderr()


def _no_setup(code: int, its: MooncakeSettings) -> str:
    if code == codes.INVALID:
        return f"Mooncake's client takes no segment of {its.segment_bytes} bytes: is there so much memory?"
    return f"Mooncake's client does not start (code {code}): is {its.master}:{its.port} a mooncake_master?"


def _tame_stderr() -> None:
    """Mooncake writes lines for each call and each try to reach a master that is away: a few of them go to the log."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # better a line is lost than that it is waited for
    os.dup2(writing, 2)
    os.close(writing)

    def pass_on() -> None:
        window_s, said = time.monotonic(), 0
        with open(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                now_s = time.monotonic()
                if now_s - window_s > LOG_WINDOW_S:
                    window_s, said = now_s, 0
                said += 1
                if said <= LOG_LINES:
                    rest = ": more of it follows in a minute (set MC_LOG_LEVEL to see all)" if said == LOG_LINES else ""
                    log.info("Mooncake: %s%s", line.strip()[:300], rest)

    threading.Thread(target=pass_on, name="stderr", daemon=True).start()
