"""System calls beyond files and sockets without which nothing works: tried before the daemon serves.

A container runtime, a sandbox or an old kernel may refuse any of them. What the daemon can do without is not tried
here: the part that uses such a call goes on without, and says so (OPERATING.md has the table).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import threading
from collections.abc import Callable

from tiercache.errors import ConfigError

_PAGE_BYTES = mmap.PAGESIZE


def refused(call: str, error: OSError) -> str:
    """A refused system call as one text, with what to do."""
    return f"the kernel refuses {call} ({error.strerror}): allow it in the seccomp profile of the container or sandbox"


def check_calls() -> None:
    """Try the calls that nothing works without. Raises ConfigError for the first one that is refused."""
    for call, attempt in _NEEDED.items():
        try:
            attempt()
        except OSError as error:
            raise ConfigError(refused(call, error)) from None


def check_threads(count: int) -> None:
    """Raise ConfigError unless the process may have `count` more threads at once.

    ZeroMQ aborts a process in which it cannot start its threads, and a part without its thread does nothing.
    """
    go = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=go.wait, name="check", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        text = f"the daemon needs {count} more threads, and the system allows it {len(started)}"
        remedy = "raise the limit (ulimit -u, TasksMax= of a systemd unit, a pod's limit of pids), or allow clone"
        raise ConfigError(f"{text}: {remedy} and clone3 in the seccomp profile of the container or sandbox") from None
    finally:
        go.set()
        for thread in started:
            thread.join()


def _memfd(attempt: Callable[[int], object]) -> None:
    fd = os.memfd_create("tiercache-check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        attempt(fd)
    finally:
        os.close(fd)


def _map_shared(fd: int) -> None:
    os.ftruncate(fd, _PAGE_BYTES)
    mmap.mmap(fd, _PAGE_BYTES).close()


def _socket_pair() -> None:
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        end.close()


_NEEDED: dict[str, Callable[[], object]] = {
    "memfd_create": lambda: _memfd(lambda fd: None),
    "fallocate": lambda: _memfd(lambda fd: os.posix_fallocate(fd, 0, _PAGE_BYTES)),
    "fcntl(F_ADD_SEALS)": lambda: _memfd(lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)),
    "mmap of shared memory": lambda: _memfd(_map_shared),
    # ZeroMQ aborts the process without these.
    "sched_getscheduler": lambda: os.sched_getscheduler(0),
    "sched_getparam": lambda: os.sched_getparam(0),
    "sched_setscheduler": lambda: os.sched_setscheduler(0, os.sched_getscheduler(0), os.sched_getparam(0)),
    "eventfd2": lambda: os.close(os.eventfd(0, os.EFD_CLOEXEC)),
    "epoll_create1": lambda: select.epoll().close(),
    "socketpair": _socket_pair,
}
"""By the name that a seccomp profile has for it."""
