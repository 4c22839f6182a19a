"""A private daemon as a child process that ends with its parent.

The child holds the read end of a pipe and ends when that reads end of file: however the parent ends, the kernel closes
the write end. A forked child of the parent closes its copy of it. A private run directory is removed by the parent, or
by the daemon if it outlives the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tiercache.client.client import Client, close_all_clients
from tiercache.config.daemon_config import env_name, flag_name, load_config, session_socket_path
from tiercache.config.settings import SETTINGS
from tiercache.errors import ConfigError, DaemonUnavailable, TierCacheError
from tiercache.ground import forks
from tiercache.ground.file_systems import make_directory
from tiercache.ground.isolated import python_command

STOP_TIMEOUT_S = 10.0
"""How long a daemon may take to end, beside its `grace`."""
START_TIMEOUT_S = 30.0
POLL_S = 0.01
ALL_MEMORY_S = 2.0
"""A large arena may fill while it is used already; a small one is complete when `launch` returns."""
LOG_LINES = 5
MAX_TEMP_DIR_BYTES = 80


class LaunchedDaemon:
    """A daemon that belongs to this process. Close it, or use it in a `with`.

    Attributes:
        address: to be passed to `tiercache.connect`.
        pid: its process id.
        log: path of its log.
    """

    def __init__(
        self,
        run_dir: Path,
        private: bool,
        log: Path,
        command: list[str],
        secrets: Mapping[str, str] | None = None,
        grace_s: float = 0.0,
    ) -> None:
        """`secrets`: what its environment has besides ours, since every user can read a command line.

        `grace_s`: its setting `grace`.
        """
        self.address = str(run_dir)
        self.log = log
        self._command = command
        self._secrets = secrets or {}
        self._private = private
        self._stop_timeout_s = grace_s + STOP_TIMEOUT_S
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._process, self._pipe = _spawn(command, self._secrets, log)
        self.pid = self._process.pid
        _running.add(self)
        forks.watch(self, "_lock")

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def answers(self, timeout_s: float) -> bool:
        """True if it lets in a new client, and answers it, within `timeout_s` each. Blocks for at most that time."""
        try:
            with Client.connect(
                self.address, name="launch", map_arena=False, timeout_s=timeout_s, request_timeout_s=timeout_s
            ) as client:
                client.ping()
        except TierCacheError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL, and wait for its end: for a daemon that hangs. Its blocks on NVMe stay. Any thread."""
        with self._lock:
            if not self._closed and os.getpid() == self._owner_pid:
                self._process.kill()
                self._process.wait(STOP_TIMEOUT_S)

    def restart(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start it again after its end, at the same address: clients find it by themselves. Any thread.

        Blocks until it answers. Raises DaemonUnavailable when it did not start, or is closed.
        """
        with self._lock:
            if self._closed or os.getpid() != self._owner_pid:
                raise DaemonUnavailable("the daemon is closed, or another process's: launch another one")
            assert self.poll() is not None, "it runs"
            process, pipe = _spawn(self._command, self._secrets, self.log)
            os.close(self._pipe)
            self._process, self._pipe, self.pid = process, pipe, process.pid
        _await_answer(self, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """SIGTERM, wait, SIGKILL after `timeout_s`; removes a run directory made for it. Idempotent.

        By default it waits for the daemon's `grace` (in which the daemon writes to NVMe what only DRAM has) and 10 s.
        """
        if os.getpid() != self._owner_pid:
            return  # a forked child does not own its parent's daemon
        with self._lock:
            self._closed = True
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                # A stopped daemon does not see the signal before it continues.
                self._process.send_signal(signal.SIGCONT)
                try:
                    self._process.wait(self._stop_timeout_s if timeout_s is None else timeout_s)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait(STOP_TIMEOUT_S)
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1
            _running.discard(self)
            if self._private:
                shutil.rmtree(self.address, ignore_errors=True)

    def forget_in_child(self) -> None:
        """After a fork, in the child: the daemon must end with the parent, not with its last child."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def __enter__(self) -> LaunchedDaemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def launch(
    arena: str | int = "1GiB",
    *,
    run_dir: str | Path | None = None,
    log: str | Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
    **config: str | float | bool,
) -> LaunchedDaemon:
    """Start a daemon and wait until it answers.

    Args:
        arena: size of its DRAM tier, e.g. "1GiB".
        run_dir: where its sockets are; by default a new private directory, removed at the end.
        log: where its stderr goes; by default `daemon.log` in the run directory.
        timeout_s: how long it may take to answer.
        **config: further settings of the daemon by their keys, e.g. `region="64MiB"`.

    Blocks until it answers and has memory.

    Raises:
        ConfigError: a run directory whose path is too long for a socket, or that cannot be made.
        DaemonUnavailable: it did not start; the text ends with the last lines of its log.
    """
    private = run_dir is None
    directory = Path(_private_dir() if run_dir is None else run_dir).absolute()
    try:
        session_socket_path(directory)
        try:
            make_directory(directory, 0o700)
        except OSError as error:
            raise ConfigError(f"run_dir {directory} cannot be made ({error.strerror}): name another one") from None
        log_path = Path(log) if log is not None else directory / "daemon.log"
        secrets = {env_name(key): str(value) for key, value in config.items() if _is_secret(key)}
        plain = {key: value for key, value in config.items() if not _is_secret(key)}
        command = _command(directory, private, arena, plain)
        daemon = LaunchedDaemon(directory, private, log_path, command, secrets, _grace_s(config))
    except BaseException:
        if private:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    try:
        _await_answer(daemon, timeout_s)
    except BaseException:
        daemon.close(1.0)
        raise
    return daemon


def _private_dir() -> str:
    """A new directory of mode 0700 whose path leaves room for the names of sockets."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > MAX_TEMP_DIR_BYTES:
        base = "/tmp"
    return tempfile.mkdtemp(prefix="tiercache-", dir=base)


def _command(directory: Path, private: bool, arena: str | int, config: dict[str, str | float | bool]) -> list[str]:
    command = python_command("tiercache.daemon", "--run-dir", str(directory), "--arena", str(arena))
    for key, value in config.items():
        command += [flag_name(key), str(value)]
    return [*command, "--remove-run-dir"] if private else command


def _grace_s(config: Mapping[str, object]) -> float:
    """The daemon's `grace`; 0 for settings that it refuses."""
    try:
        return load_config(flags=config).grace_s
    except ConfigError:
        return 0.0


def _is_secret(key: str) -> bool:
    """True if a setting belongs in the environment: a command line can be read by every user of the host."""
    return key in SETTINGS and SETTINGS[key].kind.secret


def _spawn(command: list[str], secrets: Mapping[str, str], log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and our end of the pipe that keeps it alive."""
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    try:
        with log.open("ab") as log_file:
            process = subprocess.Popen(
                [*command, "--parent-fd", str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=[theirs],
                env={**os.environ, **secrets},
                # Control-C at a terminal is for the engine; the daemon ends with it, and not before.
                start_new_session=True,
            )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return process, ours


def _await_answer(daemon: LaunchedDaemon, timeout_s: float) -> None:
    """Wait until the daemon answers and has memory: some of it at least, all of it if that comes soon."""
    start_s = time.monotonic()
    reason = "it does not answer"
    while (waited_s := time.monotonic() - start_s) < timeout_s and daemon.poll() is None:
        if session_socket_path(daemon.address).exists():
            try:
                memory = _memory(daemon)
                if memory["populated_bytes"] >= (memory["bytes"] if waited_s < ALL_MEMORY_S else 1):
                    return
                reason = "it has no memory for its arena yet"
            except TierCacheError as error:
                reason = str(error)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon._process.wait(POLL_S)
    status = daemon.poll()
    why = f" within {timeout_s:g} s: {reason}" if status is None else f": it ended with status {status}"
    raise DaemonUnavailable(f"the daemon did not start{why}{_last_lines(daemon.log)}")


def _memory(daemon: LaunchedDaemon) -> dict[str, int]:
    with Client.connect(daemon.address, name="launch", map_arena=False, timeout_s=0.5) as client:
        memory: dict[str, int] = client.stats()["arena"]
        return memory


def _last_lines(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in lines[-LOG_LINES:])


_running: set[LaunchedDaemon] = set()


def _close_all() -> None:
    close_all_clients()  # first, or they would log the daemon's end
    for daemon in list(_running):
        daemon.close()


atexit.register(_close_all)

__all__ = ["ConfigError", "LaunchedDaemon", "launch"]
