"""How a session begins: the hello, over a Unix socket or to another host, and the daemon's welcome."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from tiercache.client.channel import process_context
from tiercache.config.daemon_config import session_socket_path
from tiercache.errors import DaemonUnavailable, ProtocolError, RequestRefused
from tiercache.protocol.curve import Remote
from tiercache.protocol.messages import MAX_MESSAGE_BYTES, Hello, Refused, Regions, SessionMessage, Welcome
from tiercache.protocol.wire import UNREADABLE, send_packet

Message = Welcome | Refused | Regions | None
"""What the daemon says on the session socket; None is end of file."""

_decode = msgspec.msgpack.Decoder(SessionMessage).decode
_encode = msgspec.msgpack.Encoder().encode


def greet_nearby(
    sock: socket.socket, address: str | Path, hello: Hello, timeout_s: float, receive: Callable[[], Message]
) -> Welcome:
    """Connect `sock` to the daemon of a run directory and say hello; `receive` reads from it.

    Raises OSError, DaemonUnavailable, RequestRefused, ProtocolError.
    """
    path = session_socket_path(address)
    check_owner(path.parent)
    sock.settimeout(timeout_s)
    sock.connect(str(path))
    # The daemon watches the pidfd: frames that we may still be writing to stay ours until we have exited.
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError as error:
        text = f"pidfd_open is refused ({error.strerror}): allow it in the seccomp profile of this container"
        raise OSError(error.errno, text) from None
    try:
        send_packet(sock, _encode(hello), [pidfd])
    except BrokenPipeError:
        pass  # refused unread: the reason waits to be read
    finally:
        os.close(pidfd)
    try:
        message = receive()
    except ConnectionResetError:
        message = receive()  # refused unread: the reason comes after the error
    return _welcome(message)


def greet_remote(remote: Remote, hello: Hello, timeout_s: float) -> Welcome:
    """Say hello to a daemon on another host. Raises DaemonUnavailable, RequestRefused, ProtocolError."""
    text = f"nothing answers at {remote.endpoint}, or it has other keys, or it does not let ours in"
    context = process_context()
    with context.socket(zmq.DEALER) as sock:
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        remote.prepare(sock)
        try:
            sock.connect(remote.endpoint)
            sock.send(_encode(hello))
            if not sock.poll(max(1, int(timeout_s * 1000))):
                raise DaemonUnavailable(text)
            message = _decode(sock.recv())
        except zmq.ZMQError as error:
            raise DaemonUnavailable(f"{remote.endpoint}: {error}") from error
        except UNREADABLE as error:
            raise ProtocolError(f"the daemon answered the hello with something else: {error}") from error
    return _welcome(message)


def _welcome(message: Message) -> Welcome:
    if isinstance(message, Refused):
        raise RequestRefused(message.code, message.text)
    if not isinstance(message, Welcome):
        raise ProtocolError("the daemon did not answer the hello with a welcome")
    return message


def check_owner(run_dir: Path) -> None:
    """Refuse a run directory of another user in a folder such as /tmp (sticky), where any user could have made it.

    A daemon there would receive all blocks and could return anything. Raises DaemonUnavailable; a client of root may
    use any directory. OSError where there is no such directory.
    """
    owner, user = os.lstat(run_dir).st_uid, os.geteuid()
    shared = stat.S_IWOTH | stat.S_ISVTX
    if user != 0 and owner not in (0, user) and os.stat(run_dir.parent).st_mode & shared == shared:
        text = f"{run_dir} belongs to user {owner}, and all users can make directories there"
        raise DaemonUnavailable(f"{text}: it may be no daemon of ours; a shared one has its run_dir elsewhere")


def explain_absence(error: OSError) -> str:
    """Why no connection to a run directory could be made, for people."""
    if error.errno == errno.ENOENT:
        return "there is no session socket"
    if error.errno == errno.ECONNREFUSED:
        return "its process is gone"
    if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
        return "it does not answer the hello"
    return str(error)
