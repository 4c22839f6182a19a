"""Faults 24, 41, 42, 43: too much, too many, too long, and silence. Others are answered all the while."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from fault_peer import Peer
from fault_processes import Daemon

from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

MIB = 1 << 20


def test_24_connections_to_the_control_socket_never_take_the_last_descriptor(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], closing: ExitStack
) -> None:
    """ZeroMQ aborts without one. As fast as can be, and with few: what it accepts unseen is bounded too."""
    files = 1400

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, files))

    daemon = start_daemon("--arena", "16MiB", "--region", "16MiB", preexec=limit)
    peer = connect(daemon)
    assert isinstance(peer.tell(m.Ping), m.Done)  # a request on a connection that was never heard may be lost with it
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2 * files), hard), hard))
    closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    deadline_s = time.monotonic() + 45
    for _ in range(files + 100):
        sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setblocking(False)
        while True:
            assert time.monotonic() < deadline_s
            with suppress(BlockingIOError):
                sock.connect(peer.control.removeprefix("ipc://"))
                break
    assert isinstance(peer.tell(m.Ping), m.Done)
    assert f"may open {files} files" in daemon.log(), "the log says that it admits fewer than configured"
    with connect(daemon) as late:
        assert isinstance(late.tell(m.Ping), m.Done)
