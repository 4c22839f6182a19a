"""Connects commands to the daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tiercache import __version__
from tiercache.cli.exit_status import NotAnswering
from tiercache.config.daemon_config import default_address, session_socket_path
from tiercache.errors import DaemonUnavailable, RequestRefused, TierCacheError

if TYPE_CHECKING:
    from tiercache.client.client import Client

CONNECT_DEADLINE_S = 3.0
REQUEST_S = 2.0
"""Deadline of a request. People are more patient than engines: on a busy machine the daemon may only be slow."""
NOT_OURS = "run this as the daemon's user, or have the daemon share its sockets with a group of yours (--group)"
_REMEDY = "start a daemon with `tiercache daemon`, or name its run directory with --address"


@contextmanager
def connected(address: str | None) -> Iterator[Client]:
    """A client of the daemon at `address` (the default one when None) that maps no memory.

    Blocks for at most a few seconds. Raises DaemonUnavailable, with what to do about it.
    """
    from tiercache.client.client import Client
    from tiercache.protocol.curve import is_remote

    where = address or default_address()
    # A client would wait for the socket to appear; a command should not.
    if not is_remote(where):
        if is_barred(where):
            raise DaemonUnavailable(f"{where} may not be entered: {NOT_OURS}")
        if not session_socket_path(where).exists():
            raise DaemonUnavailable(f"no daemon at {where}: {_REMEDY}")
    try:
        client = Client.connect(
            where, name="tiercache-cli", map_arena=False, request_timeout_s=REQUEST_S, timeout_s=CONNECT_DEADLINE_S
        )
    except DaemonUnavailable as error:
        _say_if_it_hangs(where)
        raise DaemonUnavailable(f"{error}: {_REMEDY}") from None
    try:
        yield client
    except DaemonUnavailable:
        _say_if_it_hangs(where)
        raise
    except RequestRefused as refusal:
        if refusal.code != "malformed":
            raise
        raise RequestRefused("another release", _other_release(client, where)) from None
    finally:
        client.close()


def _other_release(client: Client, where: str) -> str:
    """What to say of a daemon that does not understand a request of ours: a command sends none that is malformed."""
    try:
        release = str(client.stats()["daemon"]["version"])
    except (TierCacheError, KeyError):
        release = "unknown"
    which = (
        f"another build of release {release}"
        if release == __version__
        else f"release {release}, this command of {__version__}"
    )
    remedy = "restart it to run what is installed here, or use the command that was installed with it"
    return f"the daemon at {where} does not know this request: it is of {which}; {remedy}"


def is_barred(where: str | Path) -> bool:
    """True if this user may not enter a run directory, or not open the socket in it."""
    path = session_socket_path(where)
    if os.access(path, os.W_OK):
        return False
    # Only an attempt tells for sure: `access` asks for the real user, and a seccomp profile may refuse the question.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trial:
        trial.setblocking(False)
        try:
            trial.connect(str(path))
        except OSError as error:
            return error.errno == errno.EACCES
    return False


def _say_if_it_hangs(where: str) -> None:
    """Raise NotAnswering if a daemon runs nevertheless."""
    from tiercache.protocol.curve import is_remote

    pid = None if is_remote(where) else serving_pid(Path(where))
    if pid is None:
        return
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return  # it ended just now
    why, remedy = "it hangs, or is very busy", f"see its log, and if that lasts end it with kill -9 {pid}"
    if state in "Tt":
        why, remedy = "it was stopped (SIGSTOP)", f"let it go on with kill -CONT {pid}"
    elif state == "D":
        why = "it waits for a disk"
    raise NotAnswering(f"the daemon at {where} (pid {pid}) does not answer: {why}: {remedy}", pid) from None


def serving_pid(run_dir: Path) -> int | None:
    """The process that serves a run directory; None if there is none, or if access is denied."""
    try:
        fd = os.open(run_dir / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None
    finally:
        os.close(fd)
    return None
