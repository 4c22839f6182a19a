"""Fault 22 on the session socket: what is no hello, and descriptors that are no pidfd."""

from __future__ import annotations

import os
import random
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from fault_messages import END, answer_on, greet
from fault_peer import Peer, hello, open_session_socket
from fault_processes import Daemon, open_fds
from waiting import wait_until

from tiercache.config.daemon_config import session_socket_path
from tiercache.protocol import messages as m
from tiercache.protocol.wire import send_packet

GREETINGS: dict[str, Callable[[], bytes]] = {
    "noise": lambda: random.Random(1).randbytes(300),
    "one byte": lambda: b"\xc1",
    "truncated": lambda: hello(b"i" * 16)[:-3],
    "a request": lambda: msgspec.msgpack.encode(m.Ping(1, b"", 1, 1)),
    "short instance": lambda: hello(b"i" * 15),
    "no instance": lambda: hello(b""),
    "future version": lambda: hello(b"i" * 16, protocol_min=99, protocol_max=100),
    "past version": lambda: hello(b"i" * 16, protocol_min=0, protocol_max=0),
    "a name that is no text": lambda: hello(b"i" * 16, name="NN").replace(b"NN", b"\xff\xfe"),
    "deeper than the stack": lambda: b"\x98" + hello(b"i" * 16)[1:] + b"\x91" * 1500 + b"\x90",
    "too long": lambda: hello(b"i" * 16, name="n" * 60_000),
}


@pytest.mark.parametrize("case", sorted(GREETINGS))
def test_22_a_malformed_hello_is_refused(hardened: Daemon, bystander: Peer, case: str) -> None:
    fds = open_fds(hardened.pid)
    answer = greet(hardened.run_dir, GREETINGS[case]())
    assert isinstance(answer, m.Refused)
    expected = m.ErrorCode.VERSION if "version" in case else m.ErrorCode.MALFORMED
    assert answer.code == expected.value
    wait_until(lambda: open_fds(hardened.pid) <= fds, "no descriptor is left behind")


@pytest.mark.parametrize("case", ["none", "two", "seventeen", "a pipe", "a file", "a dead process"])
def test_22_descriptors_that_are_no_pidfd_are_refused(
    hardened: Daemon, bystander: Peer, tmp_path: Path, closing: ExitStack, case: str
) -> None:
    before = open_fds(hardened.pid)
    own = os.pidfd_open(os.getpid())
    closing.callback(os.close, own)
    if case in ("none", "two"):
        fds = [own] * (2 if case == "two" else 0)
    elif case == "seventeen":
        fds = [own] * 17
    elif case == "a pipe":
        fds = list(os.pipe())
        closing.callback(os.close, fds[0])
        closing.callback(os.close, fds.pop())
    elif case == "a file":
        fds = [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)]
        closing.callback(os.close, fds[0])
    else:
        pid = os.posix_spawn("/bin/true", ["true"], os.environ)
        fds = [os.pidfd_open(pid)]
        closing.callback(os.close, fds[0])
        os.waitpid(pid, 0)
    if len(fds) > m.MAX_FDS_PER_MESSAGE:
        with open_session_socket(hardened.run_dir) as sock:
            socket.send_fds(sock, [hello(b"i" * 16)], fds)
            answer = answer_on(sock)
    else:
        answer = greet(hardened.run_dir, fds=fds)
    assert isinstance(answer, m.Refused)
    assert answer.code == m.ErrorCode.MALFORMED.value
    wait_until(lambda: open_fds(hardened.pid) <= before, "no descriptor is left behind")


def test_22_empty_packets_leave_no_descriptors_behind(hardened: Daemon, bystander: Peer) -> None:
    before = open_fds(hardened.pid)
    own = os.pidfd_open(os.getpid())
    for _ in range(20):
        assert greet(hardened.run_dir, data=b"", fds=[own] * 16) is END
    os.close(own)
    wait_until(lambda: open_fds(hardened.pid) <= before, "no descriptor is left behind")


def test_22_a_packet_after_the_welcome_ends_that_session_only(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer = connect(hardened)
    before = open_fds(hardened.pid)
    own = os.pidfd_open(os.getpid())
    send_packet(peer.sock, b"?", [own] * 16)
    os.close(own)
    assert peer.is_over()
    wait_until(lambda: open_fds(hardened.pid) < before, "its descriptors are closed")


def test_22_a_name_cannot_write_the_log(hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]) -> None:
    peer = connect(hardened, name="x\n2000-01-01 ERROR forged line\x1b[31m")
    peer.sock.send(b"?")
    assert peer.is_over()
    wait_until(lambda: "forged line" in hardened.log(), "the cut is logged")
    assert "\n2000-01-01 ERROR forged" not in hardened.log()
    assert "\x1b" not in hardened.log()


def test_24_no_other_user_may_open_the_sockets(hardened: Daemon, bystander: Peer) -> None:
    control = Path(bystander.welcome.control.removeprefix("ipc://"))
    for path in (session_socket_path(hardened.run_dir), control):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(hardened.run_dir).stat().st_mode) == 0o700
