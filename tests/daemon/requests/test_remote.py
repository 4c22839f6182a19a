"""The TCP side of a daemon: which clients are admitted, and which sessions end."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from played import played

from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.requests import remote
from tiercache.daemon.requests.remote import REMOTE_SILENCE_S, RemoteGate, RemoteSession
from tiercache.daemon.requests.router import Answer
from tiercache.daemon.requests.unsent import Unsent
from tiercache.protocol.curve import CLIENTS_DIR, load_client, make_client, make_server
from tiercache.protocol.messages import Hello

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
