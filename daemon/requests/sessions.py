"""Sessions: the session socket, tokens, and what is known of each client's process.

Clients on other hosts (see `tiercache.daemon.requests.remote`) have sessions here too, without socket and process.

A session is named by a random token, handed out over the session socket to clients that may open it. The end of the
socket ends the session; only the pidfd, readable once the process has exited, proves that it no longer writes to its
frames.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from tiercache.copies.arena import Region
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.ground.run_directory import guard
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.errors import ProtocolError
from tiercache.protocol.messages import (
    INSTANCE_BYTES,
    MAX_FDS_PER_MESSAGE,
    MAX_HELLO_BYTES,
    OLDEST_PROTOCOL,
    PROTOCOL,
    TOKEN_BYTES,
    ErrorCode,
    Hello,
    ModelCard,
    Refused,
    Regions,
    Welcome,
)
from tiercache.protocol.wire import close_fds, receive_packet, send_packet

log = logging.getLogger("tiercache.daemon")

HELLO_TIMEOUT_S = 2.0
GHOST_SHARE = 4
"""One process has at most a quarter of all ended sessions that may be waited for."""
MAX_GREETING = 32
"""Connections that have not said hello yet."""
_BACKLOG = 128
_ACCEPT_AGAIN_S = 1.0
_encode = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class Ends(Protocol):
    """Is told when sessions and their processes end."""

    def session_ended(self, session: Session) -> None:
        """The socket is closed; the process may live on."""

    def process_ended(self, session: Session) -> None:
        """The process has exited. Comes after `session_ended`."""

    def has_quarantine(self, session: Session) -> bool:
        """True if the exit of the process still matters."""


class Session:
    """One connected client. Its rights follow from the way it connected, never from what it says.

    `pid` is 0 where unknown. `mapped`: it maps the arena. `party`: who is accountable for it, see `Owner`. `tenant`:
    what its key says that it is, and all it may touch; empty for clients on this host, which are trusted.
    """

    def __init__(self, hello: Hello, party: str, *, mapped: bool = False, pid: int = 0, tenant: str = "") -> None:
        self.pid = pid
        self.tenant = tenant
        self.mapped = mapped
        name = "".join(char if char.isprintable() else "?" for char in hello.name[:64])  # it goes into logs
        self.name = name.strip() or (f"pid {pid}" if pid else "unnamed")
        self.protocol = min(PROTOCOL, hello.protocol_max)
        self.since_s = time.monotonic()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.owner = Owner(hello.instance, mapped=mapped, party=party)
        # Offset from the client's monotonic clock to ours. Late by the transit time of the message that last told the
        # client's time, the hello or a ping, and never early.
        self.clock_offset_us = time.monotonic_ns() // 1000 - hello.clock_us
        self.registration = "none"
        self.counters: dict[str, int] = {}
        self.models: dict[bytes, ModelCard] = {}
        self.registered: dict[str, str] = {}
        """For a tenant: fingerprints of its namespaces, by those of the specs it sent, which do not name the tenant."""
        self.unsent_bytes = 0
        self.open = True

    @property
    def who(self) -> str:
        """The client, for the log: what it calls itself, and what is known of it."""
        return f"{self.name} (tenant {self.tenant})"

    @property
    def party(self) -> str:
        """Who is accountable for it."""
        return self.owner.party

    @property
    def age_s(self) -> float:
        """How long it has been connected, or was."""
        return time.monotonic() - self.since_s


class LocalSession(Session):
    """A client on this host, with its session socket and the pidfd of its process."""

    def __init__(self, sock: socket.socket, pidfd: int, pid: int, uid: int, hello: Hello) -> None:
        super().__init__(hello, _process_of(pidfd, pid, hello.instance), mapped=hello.map_arena, pid=pid)
        self.sock = sock
        self.pidfd = pidfd
        self.uid = uid

    @property
    def who(self) -> str:
        """See `Session`."""
        return f"{self.name} (pid {self.pid or 'of another namespace'}, uid {self.uid})"


def refusal(hello: Hello) -> Refused | None:
    """Why this daemon refuses a client, whichever way it came; or None."""
    if hello.protocol_max < OLDEST_PROTOCOL or hello.protocol_min > PROTOCOL:
        ours, theirs = _span(OLDEST_PROTOCOL, PROTOCOL), _span(hello.protocol_min, hello.protocol_max)
        text = f"this daemon speaks protocol {ours} and its client {theirs}: use the same release of tiercache"
        return Refused(ErrorCode.VERSION.value, f"{text} on both sides")
    if len(hello.instance) != INSTANCE_BYTES:
        return Refused(ErrorCode.MALFORMED.value, f"instance must be {INSTANCE_BYTES} random bytes")
    return None


class SessionGate:
    """The listening socket and all its sessions. Event loop only; sockets never block."""

    def __init__(
        self,
        path: Path,
        welcome: Callable[[Session, int], Welcome],
        ends: Ends,
        max_sessions: int,
        counters: Counters,
        group: int | None = None,
    ) -> None:
        self.sessions: dict[bytes, Session] = {}
        self._welcome = welcome
        self._ends = ends
        self._max_sessions = max_sessions
        self._counters = counters
        self._regions: list[tuple[Region, int]] = []
        self._greeting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._ghosts: set[LocalSession] = set()
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        guard(path, group)
        self._listener.listen(_BACKLOG)
        self._listen()

    # --- coming ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: the peer waits in the backlog, and we do not spin
            log.warning("a connection could not be accepted: %s", error.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
            return
        sock.setblocking(False)
        if len(self.sessions) + len(self._greeting) >= self._max_sessions:
            self._refuse(sock, ErrorCode.LIMIT, f"{self._max_sessions} sessions are open: raise max_sessions")
            return
        if len(self._ghosts) >= self._max_sessions:
            text = f"{len(self._ghosts)} processes are waited for, which left unfinished stores: end them"
            self._refuse(sock, ErrorCode.LIMIT, text)
            return
        if len(self._greeting) >= MAX_GREETING:
            self._refuse(sock, ErrorCode.LIMIT, f"{MAX_GREETING} connections have not said hello: try again")
            return
        self._greeting[sock] = self._loop.call_later(HELLO_TIMEOUT_S, self._stop_greeting, sock, True)
        self._loop.add_reader(sock, self._greet, sock)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _stop_greeting(self, sock: socket.socket, close: bool) -> None:
        self._greeting.pop(sock).cancel()
        self._loop.remove_reader(sock)
        if close:
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            data, fds = receive_packet(sock)
        except BlockingIOError:
            return
        except OSError:
            self._stop_greeting(sock, close=True)
            return
        except ProtocolError as error:
            self._stop_greeting(sock, close=False)
            self._refuse(sock, ErrorCode.MALFORMED, str(error))
            return
        self._stop_greeting(sock, close=not data)
        try:
            if data:
                self._admit(sock, data, fds)
            else:
                close_fds(fds)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            close_fds(fds)
            self._refuse(sock, ErrorCode.MALFORMED, str(error))
        except OSError:
            close_fds(fds)
            sock.close()

    def _admit(self, sock: socket.socket, data: bytes, fds: list[int]) -> None:
        """Hello → Welcome and the regions. Raises ValueError with what is wrong."""
        if len(data) > MAX_HELLO_BYTES:
            raise ValueError(f"hello is {len(data)} bytes: at most {MAX_HELLO_BYTES}")
        hello = _decode_hello(data)
        if (refused := refusal(hello)) is not None:
            close_fds(fds)
            self._refuse(sock, ErrorCode(refused.code), refused.text)
            return
        if len(fds) != 1:
            raise ValueError("hello must carry one descriptor: the sender's own pidfd")
        session = LocalSession(sock, fds[0], *_peer_of(sock, fds[0]), hello)
        if self._is_unfinished(session.party):
            close_fds(fds)
            text = "sessions of this process left unfinished stores, as many as one may leave: restart it"
            self._refuse(sock, ErrorCode.LIMIT, text)
            return
        send_packet(sock, _encode(self._welcome(session, session.protocol)))
        self.sessions[session.token] = session
        self._counters.sessions_opened += 1
        log.debug("session %s (pid %d) has begun", session.name, session.pid)
        self._loop.add_reader(sock, self._on_packet, session)
        self._loop.add_reader(session.pidfd, self._on_process_exit, session)
        if session.mapped:
            for first in range(0, len(self._regions), MAX_FDS_PER_MESSAGE):
                self._send_regions(session, self._regions[first : first + MAX_FDS_PER_MESSAGE])

    def _is_unfinished(self, party: str) -> bool:
        """True if a process leaves so many sessions unfinished that others would soon get none."""

        def ghost_count() -> int:
            return sum(ghost.party == party for ghost in self._ghosts)

        most = max(2, self._max_sessions // GHOST_SHARE)
        if ghost_count() >= most:
            self._forget_finished()
        return ghost_count() >= most

    def _refuse(self, sock: socket.socket, code: ErrorCode, text: str) -> None:
        self._counters.sessions_refused += 1
        try:
            send_packet(sock, _encode(Refused(code.value, text)))
        except OSError as error:
            log.debug("a refused peer was gone already: %s", error)
        sock.close()

    # --- regions ---------------------------------------------------------------------------------

    def announce(self, region: Region, fd: int) -> None:
        """Send a new region to all clients that map the arena; from here on its frames may be named."""
        self._regions.append((region, fd))
        for session in list(self.sessions.values()):
            if isinstance(session, LocalSession) and session.mapped:
                self._send_regions(session, [(region, fd)])

    def _send_regions(self, session: LocalSession, regions: list[tuple[Region, int]]) -> None:
        if not session.open:
            return
        message = Regions([(region.region_id, region.size_bytes) for region, _ in regions])
        try:
            send_packet(session.sock, _encode(message), [fd for _, fd in regions])
        except OSError as error:
            # It would be named frames that it cannot map, so it should connect again.
            self.cut(session, f"it does not read its session socket ({error.strerror})")

    # --- going -----------------------------------------------------------------------------------

    def _on_packet(self, session: LocalSession) -> None:
        try:
            data, fds = receive_packet(session.sock)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            data, fds = b"", []
        close_fds(fds)
        if data:
            self.cut(session, "it sent a packet where none is expected")
        else:
            self.end(session)

    def cut(self, session: Session, why: str) -> None:
        """End a session that misbehaves or does not keep up."""
        if session.open:
            whose = f"pid {session.pid}" if isinstance(session, LocalSession) else f"tenant {session.tenant}"
            log.warning("session %s (%s) is cut: %s", session.name, whose, why)
            self._counters.sessions_cut += 1
            self.end(session)

    def end(self, session: Session) -> None:
        """Close a session; its process is still watched while frames of it are in quarantine."""
        if not session.open:
            return
        session.open = False
        log.debug("session %s (pid %d) has ended, after %.1f s", session.name, session.pid, session.age_s)
        try:
            self._ends.session_ended(session)
        finally:
            self.sessions.pop(session.token, None)
            if isinstance(session, LocalSession):
                self._loop.remove_reader(session.sock)
                session.sock.close()
            self._settle(session)

    def _settle(self, session: Session) -> None:
        """Decide whether to keep waiting for the process of this ended session."""
        self._forget_finished()
        if not isinstance(session, LocalSession):
            self._ends.process_ended(session)  # what it writes comes as messages: none is half done
        elif self._ends.has_quarantine(session):
            self._ghosts.add(session)
        else:
            self._forget_process(session)

    def _forget_finished(self) -> None:
        """Forget ended sessions whose copies are finished, as other sessions of their instances have said."""
        for ghost in [ghost for ghost in self._ghosts if not self._ends.has_quarantine(ghost)]:
            self._ghosts.remove(ghost)
            self._forget_process(ghost)

    def _on_process_exit(self, session: LocalSession) -> None:
        self.end(session)
        if session in self._ghosts:
            self._ghosts.remove(session)
            self._ends.process_ended(session)
            self._forget_process(session)

    def _forget_process(self, session: LocalSession) -> None:
        self._loop.remove_reader(session.pidfd)
        os.close(session.pidfd)

    def close(self) -> None:
        """End all sessions, at shutdown."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for sock in list(self._greeting):
            self._stop_greeting(sock, close=True)
        for session in list(self.sessions.values()):
            self.end(session)


def _span(oldest: int, newest: int) -> str:
    """Protocol versions, for people."""
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def _process_of(pidfd: int, pid: int, instance: bytes) -> str:
    """What tells a client's process from all others, however often it connects.

    The inode number of a pidfd where the kernel has one (Linux 6.9), else the start time of the process. An older
    kernel tells nothing about a process in another pid namespace, so there the client's word has to do.
    """
    status = os.fstat(pidfd)
    with select.epoll() as anonymous:
        if status.st_dev != os.fstat(anonymous.fileno()).st_dev:
            return f"process {pid or 'of another pid namespace'} (pidfd {status.st_ino})"
    if not pid:
        return f"instance {instance.hex()}"
    stat = Path(f"/proc/{pid}/stat").read_text()
    return f"process {pid} (begun at {stat.rpartition(')')[2].split()[19]})"


def _peer_of(sock: socket.socket, fd: int) -> tuple[int, int]:
    """The peer's pid (0 from another pid namespace) and uid. Raises ValueError unless `fd` is its pidfd."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("Pid:"):
            shown = int(line.split()[1])
            if pid > 0 and shown != pid:
                raise ValueError(f"the pidfd is of process {shown}, the sender is {pid}: connect again after a fork")
            return int(pid), int(uid)
    raise ValueError("the descriptor that came with hello is not a pidfd")
