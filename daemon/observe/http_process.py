"""The HTTP process beside the daemon: started with it, restarted when it dies, and ended with it.

No HTTP runs in the daemon: the child is a client like any other, and answering costs no other client anything. It ends
when its pipe reads end of file; if it cannot, the kernel kills it when the thread that started it is gone. So a killed
daemon leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time

from tiercache.config.daemon_config import DaemonConfig
from tiercache.config.setting_kinds import split_http
from tiercache.errors import ConfigError
from tiercache.ground import listening
from tiercache.ground.isolated import python_command

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_S = 5.0
"""A child that has lived this long has started well."""
STOP_S = 2.0
PATIENCE_S = 1.0
"""The child of a daemon that was just killed needs a moment to release the port."""
_LOOK_S = 0.05

log = logging.getLogger("tiercache.daemon")


class HttpProcess:
    """Supervises one child in a thread of its own.

    Attributes:
        problem: why HTTP is down now; empty when all is well.
    """

    def __init__(self, config: DaemonConfig) -> None:
        """Raises ConfigError if the address is not available: now, and not in the child later."""
        self.problem = ""
        # Held as long as we live, so that no other process takes the port while a child is restarted.
        self._socket = _bound(config.http)
        self._command = python_command(
            "tiercache.http",
            str(config.run_dir),
            "--listen",
            config.http,
            "--log-level",
            config.log_level,
            "--log-format",
            config.log_format,
        )
        self._command += ["--listen-fd", str(self._socket.fileno())]
        if config.http_allow_remote:
            self._command.append("--allow-remote")
        if config.http_hosts:
            self._command += ["--hosts", config.http_hosts]
        self._ending = threading.Event()
        self._lock = threading.Lock()  # no child is started after `stop` has begun
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="http process", daemon=True)

    def start(self) -> None:
        """Start the child, and restart it until `stop`. Does not block."""
        self._thread.start()

    def stop(self) -> None:
        """End the child. Blocks for seconds at most."""
        with self._lock:
            self._ending.set()
        if self._child is not None:
            with contextlib.suppress(OSError):  # a sandbox without signals: it ends with the daemon's pipe
                self._child.terminate()
                self._thread.join(STOP_S)
                self._child.kill()
        self._thread.join(STOP_S)
        self._socket.close()

    def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._ending.is_set():
            why, was_steady = self._live()
            if self._ending.is_set():
                return
            pause_s = FIRST_PAUSE_S if was_steady else min(pause_s * 2, LONGEST_PAUSE_S)
            self.problem = f"no HTTP at the moment: its process {why}, and the log says why"
            log.warning("the HTTP process %s: it is started again in %g s", why, pause_s)
            self._ending.wait(pause_s)

    def _live(self) -> tuple[str, bool]:
        """One life of the child: how it ended, and whether it had started well."""
        theirs = ours = -1
        try:
            theirs, ours = os.pipe2(os.O_CLOEXEC)
            with self._lock:
                if self._ending.is_set():
                    return "was not wanted any more", False
                # A session of its own: Control-C at a terminal is for the daemon, which ends the child.
                self._child = subprocess.Popen(
                    [*self._command, "--parent-fd", str(theirs)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs, self._socket.fileno()],
                    start_new_session=True,
                )
            try:
                return f"ended with status {self._child.wait(STEADY_S)}", False
            except subprocess.TimeoutExpired:
                self.problem = ""
                return f"ended with status {self._child.wait()}", True
        except OSError as error:
            return f"could not be started (pipe, fork, setsid or exec: {error.strerror})", False
        finally:
            for end in (theirs, ours):
                if end >= 0:
                    os.close(end)


def _bound(address: str) -> socket.socket:
    """A socket at the address. Blocks for a second at most. Raises ConfigError."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return listening.bind(*split_http(address), f"http = {address}")
        except ConfigError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_LOOK_S)
