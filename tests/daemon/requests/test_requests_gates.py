"""Who is let in, what was sent, and who is cut: the session socket, the ROUTER and the TCP side, in this process."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from played import played

from tiercache.copies.arena import Region, create_region
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.requests import remote, router, sessions
from tiercache.daemon.requests.remote import REMOTE_SILENCE_S, RemoteGate, RemoteSession
from tiercache.daemon.requests.router import Answer, Router
from tiercache.daemon.requests.sessions import LocalSession, Session, SessionGate
from tiercache.daemon.requests.unsent import Unsent
from tiercache.protocol.curve import CLIENTS_DIR, load_client, make_client, make_server
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


# --- the ROUTER's own duties between two requests ----------------------------------------------------


def router_at(path: Path, cut: list[Session]) -> Router:
    """It gives each request the same answer, and notes the sessions that it cuts."""
    endpoint, answer = f"ipc://{path}/control", Answer(b"answer", None)
    return Router(endpoint, lambda *request: answer, lambda session, why: cut.append(session), Unsent(), 10)


def session() -> Session:
    return Session(Hello(1, 1, bytes(16), "s", 0, False), "p")


@played
async def test_a_peer_that_was_heard_has_completed_its_handshake(tmp_path: Path) -> None:
    with closing(router_at(tmp_path, [])) as ours, zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(f"ipc://{tmp_path}/control")
        peer.send(b"hello")

        async def answered() -> None:
            while not peer.poll(0):
                await asyncio.sleep(0.001)

        await asyncio.wait_for(answered(), DEADLINE_S)
        ours.tick()
        assert (ours.connections.count, ours.connections._greeting) == (1, {})


@played
async def test_an_answer_that_cannot_be_sent_releases_its_block(tmp_path: Path) -> None:
    cut = list[Session]()
    with closing(router_at(tmp_path, cut)) as ours:
        done: list[str] = []
        ours.reply(b"unknown", Answer(b"header", session(), b"p" * 5000, lambda: done.append("done")))
        await asyncio.sleep(0)
        assert (done, cut, ours._sending) == (["done"], [], {}), "its session socket reports that it has gone"


@played
async def test_many_requests_at_once_are_served_a_few_milliseconds_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon still handles a session's last requests when the session ends, up to a batch."""
    now_ns, served = 0, 0
    monkeypatch.setattr(router, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns))

    def handle(identity: bytes, header: bytes, parts: object) -> None:
        nonlocal now_ns, served
        now_ns, served = now_ns + router.BATCH_NS // 4, served + 1

    endpoint = f"ipc://{tmp_path}/control"
    ours = Router(endpoint, handle, lambda session, why: None, Unsent(), 10)
    sender = zmq.Context.instance().socket(zmq.DEALER)
    sender.setsockopt(zmq.SNDHWM, 0)  # this thread receives too, so it must never wait until it can send
    sender.connect(endpoint)
    while served < 1:  # the handshake is complete
        sender.send(b"hello")
        await asyncio.sleep(0.001)
        ours.drain(1)
    while not ours.drain(router.DRAIN_REQUESTS):
        pass
    counts = []
    for limit in (router.BATCH, 3):
        empty = True
        while empty:  # the requests arrived more slowly than they were served
            for _ in range(100):
                sender.send(b"again")
            served = 0
            empty = ours.drain(limit)
        counts.append(served)
    ours.close()
    sender.close(0)
    assert counts == [4, 3]


@played
async def test_what_a_drain_leaves_does_not_wait_for_a_tick(tmp_path: Path) -> None:
    """The descriptor is edge-triggered: it does not become readable again for requests that came before."""
    served, endpoint = 0, f"ipc://{tmp_path}/control"

    def handle(identity: bytes, header: bytes, parts: object) -> None:
        nonlocal served
        served += 1

    ours = Router(endpoint, handle, lambda session, why: None, Unsent(), 10)
    with closing(ours), zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(endpoint)
        sender.send(b"hello")
        while not served:
            await asyncio.sleep(0.001)
        for _ in range(20):
            sender.send(b"again")
        while served < 4:  # without a turn of the loop, as when a session ends
            ours.drain(3)

        async def the_others() -> None:
            while served < 21:
                await asyncio.sleep(0.001)

        await asyncio.wait_for(the_others(), DEADLINE_S)


# --- the TCP side: which clients are admitted, and which sessions end --------------------------------


INSTANCE = bytes(range(16))
encode = msgspec.msgpack.encode


class Site:
    """The gate for two tenants, without the rest of a daemon. `ended` and `cut`: sessions that it has closed."""

    def __init__(self, directory: Path, max_sessions: int = 16) -> None:
        self.keys = {name: load_client(directory.parent / f"{name}.toml").public.decode() for name in ("a", "b")}
        self.sessions: dict[bytes, RemoteSession] = {}
        self.ended: list[RemoteSession] = []
        self.cut: list[RemoteSession] = []
        self.handled: list[bytes] = []
        config: Any = SimpleNamespace(curve_keys=directory, listen="tcp://127.0.0.1:*", max_sessions=max_sessions)
        self.counters = Counters()
        self.gate = RemoteGate(
            config,
            self._sessions(),
            self._handle,
            lambda session, protocol: SimpleNamespace(welcome=1),  # type: ignore[arg-type, return-value]
            self.counters,
            Unsent(),
            10,
            1,
        )

    def _sessions(self) -> SimpleNamespace:
        return SimpleNamespace(
            sessions=self.sessions, end=self.ended.append, cut=lambda session, why: self.cut.append(session)
        )

    def _handle(self, identity: bytes, header: bytes, parts: object) -> Answer:
        self.handled.append(header)
        return Answer(b"", None)

    def says(self, key: str, header: bytes) -> Answer | None:
        self.gate.router.peer = self.keys[key]
        return self.gate._serve(b"1", header, [])

    def close(self) -> None:
        self.gate.close()

    def hello(self, key: str, name: str = "engine") -> Any:
        before = set(self.sessions)
        self.says(key, encode(Hello(1, 1, INSTANCE, name, 0, False)))
        new = [session for token, session in self.sessions.items() if token not in before]
        return new[0] if new else None


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # An answer is not sent here: what it says is another test's matter.
    monkeypatch.setattr(remote, "_encode", lambda message: repr(message).encode())
    make_server(tmp_path / "keys")
    for name in ("a", "b"):
        make_client(tmp_path / "keys", name, tmp_path / f"{name}.toml")
    return tmp_path / "keys"


@played
async def test_tenants_are_never_one_engine_whatever_they_say(directory: Path) -> None:
    with closing(Site(directory)) as site:
        first, again, other = site.hello("a"), site.hello("a"), site.hello("b")
        assert first.owner.same_engine(again.owner), "workers of one engine share its leases"
        assert not first.owner.same_engine(other.owner)
        assert first.owner.instance != INSTANCE != other.owner.instance, (
            "a client of another host is not a local engine"
        )


@played
async def test_a_key_that_was_removed_is_refused_at_once(directory: Path) -> None:
    with closing(Site(directory)) as site:
        assert site.hello("a") is not None
        directory.joinpath(CLIENTS_DIR, "a.toml").unlink()
        assert site.hello("a") is None
        assert site.counters.sessions_refused == 1
        assert site.hello("b") is not None


@played
async def test_silence_ends_a_session_and_each_request_puts_that_off(directory: Path) -> None:
    with closing(Site(directory)) as site:
        silent, talks = site.hello("a"), site.hello("a")
        for session in (silent, talks):
            session.heard_s -= REMOTE_SILENCE_S + 1
        header = encode(["ping", 1, talks.token])
        site.says("a", header)
        site.gate.tick()
        assert site.handled == [header]
        assert site.ended == [silent]


@played
async def test_a_tenant_has_a_quarter_of_the_sessions_and_other_hosts_three(directory: Path) -> None:
    with closing(Site(directory, max_sessions=16)) as site:
        assert [site.hello("a") is not None for _ in range(5)] == [True] * 4 + [False]
        assert site.hello("b") is not None
        for number in range(7):  # of further tenants
            site.sessions[bytes([number])] = RemoteSession(Hello(1, 1, INSTANCE, "x", 0, False), "key", "c", 0.0)
        assert site.hello("b") is None
        for number in range(7):
            del site.sessions[bytes([number])]
        assert site.hello("b") is not None
