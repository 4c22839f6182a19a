"""Bytes that no client should send. Each message is answered, and no other client notices."""

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
from chains import chain_of
from fault_blocks import spec_of
from fault_messages import answer_on, bad_headers, greet, random_headers
from fault_peer import Peer, hello, open_session_socket
from fault_processes import Daemon, open_fds
from waiting import wait_until

from tiercache.config.daemon_config import session_socket_path
from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

BAD_HEADERS = sorted(bad_headers(b"s" * 16, 1, Path("/nowhere")))


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_22_23_a_malformed_request_is_answered(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer], tmp_path: Path, case: str
) -> None:
    peer = connect(hardened)
    before = bystander.stats()["counters"]
    bomb = tmp_path / "unpickled"
    header = bad_headers(peer.welcome.session, peer.welcome.generation, bomb)[case]
    peer.dealer.send_multipart([header])
    reply, _ = peer.receive()
    assert isinstance(reply, m.Error)
    assert reply.code == m.ErrorCode.MALFORMED.value, reply.text
    assert reply.generation == peer.welcome.generation
    assert len(reply.text) < 1000, "an error does not echo what it got"
    assert isinstance(peer.ask(m.Ping), m.Done), "the sender's session goes on"
    after = bystander.stats()["counters"]
    assert after["requests_malformed"] == before["requests_malformed"] + 1
    assert not bomb.exists(), "32: something was unpickled"


def test_22_noise(hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]) -> None:
    """Two thousand messages, random or nearly right: as many answers as messages."""
    peer = connect(hardened)
    dice = random.Random(22)
    start = (3, peer.welcome.session, peer.welcome.generation, 1 << 62)
    key = b"k" * 16
    like = [
        msgspec.msgpack.encode(request)
        for request in (
            m.Ping(*start),
            m.Match(*start, [1], key, 100, 1),
            m.Resolve(*start, 5, 1, 0, 1),
            m.Release(*start, 7),
            m.Renew(*start, [1, 2], 100),
            m.Reserve(*start, 1, b"", key, 50),
            m.Commit(*start, 3, b"\0" * 8),
            m.Abort(*start, 3, True),
            m.Read(*start, 3, 1, 0, 0, 9),
            m.Pin(*start, [1], key, 50),
            m.Hold(*start, 9),
            m.Report(*start, "none", {"a": 1}),
            m.RegisterNamespace(*start, spec_of()),
            m.Flush(*start, "x", [1], key),
        )
    ]
    for header in random_headers(dice, 2000, like):
        peer.dealer.send(header)
        reply, _ = peer.receive()
        assert isinstance(reply, m.Reply)
    assert isinstance(peer.ask(m.Ping), m.Done)


def test_22_nothing_outside_a_block_is_read_or_written(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer, spec = connect(hardened, map_arena=False), spec_of(5000)
    keys = chain_of("edges", 2)
    reserved = peer.reserve(spec, keys)
    for index, offset, length in [
        (0, 8190, 10),
        (0, -1, 10),
        (0, 0, 0),
        (0, 1 << 50, 10),
        (2, 0, 10),
        (-1, 0, 10),
        (1 << 40, 0, 1),
        (0, 0, 8193),
    ]:
        reply, _ = peer.answer_to(
            peer.post(m.Write, payload=bytes(length), lease=reserved.lease, index=index, offset=offset)
        )
        assert isinstance(reply, m.Error), (index, offset, length)
    for index in range(2):
        request_id = peer.post(m.Write, payload=b"w" * 5000, lease=reserved.lease, index=index, offset=0)
        assert isinstance(peer.answer_to(request_id)[0], m.Done)
    assert peer.commit(reserved.lease, [0, 1, 1, 7, 1 << 31]) == [0, 0, 0, 2, 2]
    lease, number = peer.match(spec, keys, ttl_ms=9000).lease, peer.register(spec)
    for index, offset, length in [
        (0, 4999, 2),
        (0, -1, 2),
        (0, 0, 0),
        (0, 0, -1),
        (2, 0, 1),
        (-1, 0, 1),
        (1 << 50, 0, 1),
        (0, 1 << 50, 1),
        (0, 0, 1 << 30),
    ]:
        reply = peer.ask(m.Read, lease=lease, namespace=number, index=index, offset=offset, length=length)
        assert isinstance(reply, m.Error), (index, offset, length)
    reply, parts = peer.answer_to(peer.post(m.Read, lease=lease, namespace=number, index=1, offset=4990, length=10))
    assert parts == [b"w" * 10]


def test_22_a_session_cannot_be_guessed_or_borrowed(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer, spec, keys = connect(hardened), spec_of(), chain_of("private", 3)
    peer.store(spec, keys)
    for session in (b"", b"x" * 16, bytes(16), peer.welcome.session[:-1]):
        reply = peer.ask(m.Flush, session=session or b"\0", tier="all", namespaces=[], key=b"")
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.UNKNOWN_SESSION.value
    peer.ask(m.Bye)
    assert peer.is_over()
    with connect(hardened) as other:
        reply = other.ask(m.Flush, session=peer.welcome.session, tier="all", namespaces=[], key=b"")
        assert reply.code == m.ErrorCode.UNKNOWN_SESSION.value
        assert other.load(spec, keys) == 3


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
