"""The session socket in this process: which clients are admitted or dropped, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from played import played

from tiercache.copies.arena import Region, create_region
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.requests import sessions
from tiercache.daemon.requests.sessions import LocalSession, Session, SessionGate
from tiercache.protocol.messages import Hello, Welcome
from tiercache.protocol.wire import send_packet

DEADLINE_S = 30.0
LONG_S = 3600.0


class Ends:
    """Records what the gate tells the server."""

    def __init__(self) -> None:
        self.ended: list[Session] = []

    def session_ended(self, session: Session) -> None:
        self.ended.append(session)

    def process_ended(self, session: Session) -> None:
        raise AssertionError("this process lives")

    def has_quarantine(self, session: Session) -> bool:
        return False


class Rig:
    """A gate, and its clients, which are in this process too."""

    def __init__(self, path: Path, max_sessions: int) -> None:
        self.path = path / "session.sock"
        self.ends = Ends()
        self.counters = Counters()
        self.clients: list[socket.socket] = []
        self.gate = SessionGate(self.path, self._welcome, self.ends, max_sessions, self.counters)

    @staticmethod
    def _welcome(session: Session, protocol: int) -> Welcome:
        return Welcome(protocol, 1, session.token, "", "0", 0, False, 16)

    def connect(self) -> socket.socket:
        """A client that says nothing."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect(str(self.path))
        client.setblocking(False)
        self.clients.append(client)
        return client

    def hello(self, client: socket.socket, instance: int = 1, map_arena: bool = False) -> None:
        pidfd = os.pidfd_open(os.getpid())
        send_packet(client, msgspec.msgpack.encode(Hello(1, 1, bytes([instance]) * 16, "c", 0, map_arena)), [pidfd])
        os.close(pidfd)

    async def answer(self, client: socket.socket) -> Any:
        """The next packet; None at the end."""
        packet = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 65536), DEADLINE_S)
        return msgspec.msgpack.decode(packet) if packet else None

    async def session(self, instance: int = 1, map_arena: bool = False) -> tuple[socket.socket, LocalSession]:
        client = self.connect()
        self.hello(client, instance, map_arena)
        tag, _, _, token, *_ = await self.answer(client)
        assert tag == "welcome"
        session = self.gate.sessions[token]
        assert isinstance(session, LocalSession)
        return client, session

    async def refused(self) -> str:
        """The gate's reason to refuse one more client."""
        client = self.connect()
        tag, code, text = await self.answer(client)
        assert (tag, code) == ("refused", "limit")
        assert await self.answer(client) is None
        return str(text)

    async def until(self, condition: Callable[[], bool]) -> None:
        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        await asyncio.wait_for(look(), DEADLINE_S)

    async def leave(self, client: socket.socket) -> None:
        """Close a client's socket, and wait until the gate has seen it."""
        ended = len(self.ends.ended)
        client.close()
        await self.until(lambda: len(self.ends.ended) > ended)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def gate_at(path: Path, max_sessions: int = 8) -> AsyncIterator[Rig]:
    """Afterwards every descriptor must be closed again."""
    before = descriptors()
    rig = Rig(path, max_sessions)
    try:
        yield rig
    finally:
        for client in rig.clients:
            client.close()
        rig.gate.close()
    assert not rig.gate.sessions
    assert descriptors() == before


@played
async def test_sessions_are_limited_and_silent_connections_count(tmp_path: Path) -> None:
    async with gate_at(tmp_path, max_sessions=2) as rig:
        await rig.session()
        silent = rig.connect()
        assert "2 sessions are open: raise max_sessions" in await rig.refused()
        rig.hello(silent)
        assert (await rig.answer(silent))[0] == "welcome"
        assert "2 sessions are open" in await rig.refused()
        await rig.leave(silent)
        await rig.session()
        assert rig.counters.sessions_refused == 2


@played
async def test_a_silent_connection_is_closed_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HELLO_TIMEOUT_S", 0.01)
    async with gate_at(tmp_path) as rig:
        assert await rig.answer(rig.connect()) is None
        assert not rig.gate._greeting


@played
async def test_regions_go_to_clients_that_map_them(tmp_path: Path) -> None:
    async with gate_at(tmp_path) as rig:
        mapped, _ = await rig.session(map_arena=True)
        other, _ = await rig.session()
        fd = create_region(4096, "test")
        rig.gate.announce(Region(3, fd, 4096), fd)
        assert await rig.answer(mapped) == ["regions", [[3, 4096]]]
        with pytest.raises(BlockingIOError):
            other.recv(1)
        rig.gate._regions[0][0].unmap()
        os.close(fd)


@played
async def test_a_client_that_does_not_read_its_regions_is_cut(tmp_path: Path) -> None:
    """Else it would be given frames that it cannot map."""
    async with gate_at(tmp_path) as rig:
        _, session = await rig.session(map_arena=True)
        session.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        fd = create_region(4096, "test")
        region = Region(0, fd, 4096)
        for _ in range(1000):
            rig.gate.announce(region, fd)
        assert (session.open, rig.counters.sessions_cut, rig.gate.sessions) == (False, 1, {})
        region.unmap()
        os.close(fd)


@played
async def test_a_packet_after_hello_ends_the_session_and_its_descriptors_are_closed(tmp_path: Path) -> None:
    async with gate_at(tmp_path) as rig:
        client, session = await rig.session()
        send_packet(client, b"x", [client.fileno()])
        assert await rig.answer(client) is None
        assert not session.open
