"""A client of the daemon: requests with deadlines, and how it behaves when the daemon fails.

    UP    calls go through; each has a deadline
    DOWN  every call raises DaemonUnavailable at once, within microseconds

`tiercache.client.keeper` says how it goes from one to the other; what belongs to one life of the daemon is in
`tiercache.client.session`.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercache.client.keeper import SessionKeeper
from tiercache.client.leases import Leases
from tiercache.client.self_report import SelfReport
from tiercache.client.session import REQUEST_TIMEOUT_S, Session, SessionSettings
from tiercache.config.daemon_config import session_socket_path
from tiercache.errors import ConfigError
from tiercache.protocol import messages
from tiercache.protocol.curve import find_remote, is_remote, public_part
from tiercache.protocol.messages import Flush, Ping, ReplyT, Request, Stats
from tiercache.protocol.namespaces import NamespaceSpec

FLUSH_TIMEOUT_S = 60.0
"""The daemon waits up to 10 s for disks, and 5 s for a shared store, before it answers a flush."""
RAMP_S = 1.0

logger = logging.getLogger("tiercache.client")


class Client:
    """A client of one daemon, for as long as the process likes. Thread-safe. Close it when done.

    One that is dropped without `close` is closed in the background when Python collects it.
    After a fork the child's copy is unusable and says so; connect again there.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        name: str = "",
        instance: bytes | None = None,
        map_arena: bool = True,
        cuda: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """Make a client that is DOWN; `start` or `connect` bring it up. Arguments as for `connect`."""
        if instance is not None and len(instance) != messages.INSTANCE_BYTES:
            raise ValueError(f"an instance is {messages.INSTANCE_BYTES} random bytes, not {len(instance)}")
        find_remote(address)  # a wrong address is reported here, not retried again and again
        self.address = public_part(address) if is_remote(address) else str(session_socket_path(address).parent)
        self.name = name
        self.instance = instance or os.urandom(messages.INSTANCE_BYTES)
        self._settings = SessionSettings(str(address), name, self.instance, map_arena, cuda)
        self.request_timeout_s = request_timeout_s
        self._keeper = SessionKeeper(self._settings, self.address)
        self.leases: Leases = self._keeper.leases
        """Leases of this client, and its loads and stores in progress."""
        self.report: SelfReport = self._keeper.report
        """What the daemon is told of this process."""
        _clients.add(self)
        weakref.finalize(self, self._keeper.stop).atexit = False  # at exit it is closed, see below

    @classmethod
    def connect(
        cls,
        address: str | Path,
        *,
        name: str = "",
        instance: bytes | None = None,
        map_arena: bool = True,
        cuda: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        timeout_s: float = 5.0,
    ) -> Client:
        """A client that is UP. Blocks for at most about `timeout_s`.

        Args:
            address: the daemon's run directory, or `tcp://HOST:PORT?key=FILE` of one on another host.
            name: this client's name in the daemon's statistics.
            instance: 16 random bytes shared by all sessions of one engine; random by default.
            map_arena: False moves bytes through the control socket, 2 MiB at a time.
            cuda: register the mapped regions with CUDA, so that copies to a GPU are direct.
            request_timeout_s: deadline of one request; after a missed one the client is DOWN.
            timeout_s: deadline of connecting.

        Raises:
            DaemonUnavailable: no daemon answers at `address`.
            RequestRefused: the daemon refuses this client (version, limits).
        """
        client = cls(
            address,
            name=name,
            instance=instance,
            map_arena=map_arena,
            cuda=cuda,
            request_timeout_s=request_timeout_s,
        )
        try:
            client.start(timeout_s, required=True)
        except BaseException:
            client.close()
            raise
        return client

    def start(self, timeout_s: float, *, required: bool, warn: bool = True) -> None:
        """Try for `timeout_s` to come UP (once, if not `required`), then continue in the background.

        Without `warn` the caller reports that there is no daemon yet; `session` tells it why.
        """
        self._keeper.start(timeout_s, required=required, warn=warn)

    @property
    def request_timeout_s(self) -> float:
        """Deadline of one request. It may be changed at any time, for requests that are sent from then on."""
        return self._settings.request_timeout_s

    @request_timeout_s.setter
    def request_timeout_s(self, seconds: float) -> None:
        if seconds <= 0:
            raise ValueError(f"request_timeout_s is {seconds}: must be more than 0")
        self._settings.request_timeout_s = seconds

    @property
    def alive(self) -> bool:
        """True while UP."""
        return self._keeper.up is not None

    @property
    def forked(self) -> bool:
        """True if this is a child's copy of its parent's client."""
        return self._keeper.forked

    @property
    def times_up(self) -> int:
        """How often it came UP."""
        return self._keeper.times_up

    @property
    def times_down(self) -> int:
        """How often it went DOWN."""
        return self._keeper.times_down

    @property
    def wants_events(self) -> bool:
        """True if the daemon publishes KV events; False when DOWN."""
        session = self._keeper.up
        return session is not None and session.welcome.kv_events

    def session(self) -> Session:
        """The session, while UP. Raises DaemonUnavailable at once when DOWN. Takes no lock."""
        return self._keeper.session()

    def call(self, request_type: type[Request[ReplyT]], *, timeout_s: float | None = None, **fields: Any) -> ReplyT:
        """Send one request and return its reply, for all requests without payload.

        Raises RequestRefused for an `Error` reply, DeadlineExceeded, DaemonUnavailable.
        """
        return self.session().call(request_type, timeout_s, **fields)

    def ping(self) -> float:
        """One round trip; returns seconds."""
        start_s = time.perf_counter()
        self.session().call(Ping)
        return time.perf_counter() - start_s

    def stats(self, *, histograms: bool = False, hot_prefixes: int = 0) -> dict[str, Any]:
        """The daemon's statistics; `daemon/MONITORING.md` explains them, and what each argument adds."""
        return self.session().call(Stats, histograms=histograms, hot_prefixes=hot_prefixes).stats

    def flush(self, *, tier: str = "all", namespaces: Sequence[NamespaceSpec] = (), key: bytes = b"") -> int:
        """Drop blocks of `namespaces`: `key` with what follows it, or everything. None named: of all, if there is no
        `key` or no shared store.

        Of a windowed namespace, only `key` itself is dropped. Returns how many blocks were dropped. A shared store that
        is away is told later, which is logged. Raises RequestRefused (`unconfirmed`) when a disk may bring blocks back.
        Blocks for some seconds where a store or a disk does not answer, for `FLUSH_TIMEOUT_S` at most.
        """
        session = self.session()
        namespace_ids = [session.namespace_id(spec) for spec in namespaces]
        flushed = session.call(Flush, FLUSH_TIMEOUT_S, tier=tier, namespaces=namespace_ids, key=key)
        if flushed.kept:
            logger.warning("%d blocks flushed on this host; %s", flushed.blocks, flushed.kept)
        return flushed.blocks

    @property
    def warmth(self) -> float:
        """1 normally; rises from 0 to 1 in the first second after the daemon came back."""
        if self.times_up < 2:
            return 1.0
        return min(1.0, (time.monotonic() - self._keeper.up_since_s) / RAMP_S)

    def expect(self, spec: NamespaceSpec, *, direct: bool = False) -> None:
        """Register `spec` in every session as soon as it begins.

        With `direct` as one whose blocks this process reads on NVMe itself.
        """
        if problem := spec.problem():
            raise ConfigError(f"this namespace cannot be served: {problem}")
        self._keeper.expect(spec, direct=direct)

    def register(self, spec: NamespaceSpec) -> int:
        """The id of `spec` in the present session; it is registered again in every later one."""
        self.expect(spec)
        return self.session().namespace_id(spec)

    def announce(self, models: Sequence[messages.ModelCard]) -> None:
        """Announce the models of which this process stores blocks; replaces what was announced before.

        Sent in the background, and again in every later session. The daemon tells those who ask.
        """
        self.report.models = list(models)
        self._keeper.wake()

    def close(self) -> None:
        """End the session. Blocks for at most about 2 s. Idempotent.

        Loads and stores in progress begin no further copy. Copies that take longer than this end in the background, and
        the session after them, so that the daemon learns that their frames are free.
        """
        self._keeper.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def close_all_clients() -> None:
    """Close every client of this process, as at its exit."""
    for client in list(_clients):
        client.close()


atexit.register(close_all_clients)
