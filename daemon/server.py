"""The daemon: one event loop that owns all state, and a few threads that report to it.

    session socket ─► SessionGate ─┐
    ROUTER ─► Router ─► Service ───┼─► Cache          (all on the loop)
    RegionMaker ─ regions ─────────┘                  (a thread)

Once per tick the loop serves the requests that are here, and then lets leases expire: a daemon that was stopped for a
while reads the renewals in its queue before it decides.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tiercache import __version__
from tiercache.config.daemon_config import DaemonConfig, Resolved, control_endpoint, session_socket_path
from tiercache.copies.arena import Region
from tiercache.daemon.events.events import Events
from tiercache.daemon.events.publisher import Publisher
from tiercache.daemon.ground.clock import LeaseClock
from tiercache.daemon.ground.health_log import HealthLog
from tiercache.daemon.ground.logs import STDERR
from tiercache.daemon.ground.memory import collect_in_small_parts, grow_without_copies
from tiercache.daemon.ground.niceness import go_first
from tiercache.daemon.ground.regions import RegionMaker
from tiercache.daemon.ground.run_directory import RunDir, find_group
from tiercache.daemon.ground.system_calls import check_threads
from tiercache.daemon.observe.http_process import HttpProcess
from tiercache.daemon.observe.reuse import WhatIf
from tiercache.daemon.requests.context import RequestContext
from tiercache.daemon.requests.router import DRAIN_REQUESTS, Answer, Router
from tiercache.daemon.requests.service import Service
from tiercache.daemon.requests.sessions import Session, SessionGate
from tiercache.daemon.requests.slow import SlowRequests
from tiercache.daemon.requests.stats import build_stats, health_of
from tiercache.daemon.requests.unsent import Unsent
from tiercache.daemon.tiers.dram.unfinished import FLOOR_SHARE
from tiercache.daemon.tiers.lower_tiers import LowerTiers
from tiercache.ground.units import format_bytes
from tiercache.protocol.messages import Welcome

from .cache import Cache, CacheLimits
from .descriptors import CONNECTIONS_PER_SESSION
from .live_settings import LiveSettings
from .processes import threads_needed

if TYPE_CHECKING:
    from tiercache.daemon.observe.recorder import Recorder
    from tiercache.daemon.requests.remote import RemoteGate

log = logging.getLogger("tiercache.daemon")

TICK_S = 0.01
IDLE_TICK_S = 0.05
IDLE_S = 0.25
"""Without requests for this time ticks are `IDLE_TICK_S` apart: one every 10 ms costs 2 to 3% of a core for nothing."""
WORK_NS = 2_000_000
"""Time after which deferred work stops to serve others; the slice in progress is finished."""
PUBLISH_NS = 4_000_000
"""Time that a commit publishes before others are served; the run in progress is finished. Usual ones take less."""
_TICK_REQUESTS = 256
_MAX_UNDRAINED_TICKS = 50


class Server:
    """One daemon. `run` returns its exit status."""

    def __init__(
        self, running: Resolved, again: Callable[[], Resolved], log_figures: Callable[[], dict[str, Any]] = dict
    ) -> None:
        """`again` reads the settings again, for a reload."""
        config = self.config = running.config
        self.log_figures = log_figures
        self._health_log = HealthLog()
        self.started_s = time.monotonic()
        self.generation = secrets.randbits(63) | 1
        self.clock = LeaseClock()
        self.regions: dict[int, Region] = {}
        self.below = LowerTiers.of(config, self.regions, self._landed, self._work_soon)
        self.nvme, self.shared = self.below.nvme, self.below.shared
        limits = CacheLimits(
            config.policy,
            config.headroom_bytes,
            config.pin_share,
            dict(config.quota),
            dict(config.nvme_quota),
            config.quarantine_per_client_bytes,
            FLOOR_SHARE,
            secrets.randbits(128),
        )
        self.events = _make_events(config) if config.kv_events else None
        below_bytes = config.nvme_capacity_bytes
        what_if = WhatIf(self.clock, config.arena_bytes, below_bytes) if config.what_if else None
        self.cache = Cache(self.clock, limits, self.below, self.events, what_if)
        self.cache.space.populating = True  # until the last of `_add_region`
        self.cache.work_ns, self.cache.writes.pending.publish_ns = WORK_NS, PUBLISH_NS
        self.settings = LiveSettings(running, again, self.cache)
        self.below.attach(self.cache.space, self.cache.reads.growing, self.cache.writes, self.events)
        if self.nvme is not None:
            self.nvme.limit_work(WORK_NS)
        self.recorder: Recorder | None = None
        self.http: HttpProcess | None = None
        self.problem = ""
        self._serving = self._over = False
        self._working = False
        self._undrained_ticks = 0
        self._requests_seen = 0
        self._idle_from_s = 0.0
        # The time that a request has queued is known to one tick, which must be only a part of what counts as slow.
        exact = 0 < config.slow_request_s < 4 * IDLE_TICK_S
        self._idle_tick_s = TICK_S if exact else IDLE_TICK_S
        self._stopping = asyncio.Event()

    async def run(self, parent_fd: int | None = None) -> int:
        """Serve until SIGTERM, SIGINT, or the end of file on `parent_fd`. Raises ConfigError."""
        self.loop = asyncio.get_running_loop()
        grow_without_copies()
        check_threads(threads_needed(self.config, self.shared.store.connections if self.shared is not None else 0))
        run_dir = RunDir(self.config.run_dir, find_group(self.config.group))
        try:
            self._watch(parent_fd)
            await self.below.open(self._stopping)
            self._open()
            go_first()  # after ZeroMQ's threads were started: those started later do not inherit it
            log.info(
                "tiercache %s serves %s: arena %s, pid %d",
                __version__,
                self.config.run_dir,
                format_bytes(self.config.arena_bytes),
                os.getpid(),
            )
            if self.http is not None:
                self.http.start()
            self._serving = True
            _notify_systemd("READY=1")
            collect_in_small_parts()
            self._tick()
            await self._stopping.wait()
            self._serving = False
            _notify_systemd("STOPPING=1")
            if self.http is not None:
                await self.loop.run_in_executor(None, self.http.stop)
            self._close()
            await self.below.close(self.config.grace_s)
        finally:
            if self.recorder is not None:
                await self.loop.run_in_executor(None, self.recorder.close)
            self._over = True
            if self.events is not None:
                self.events.close()
            run_dir.close()
        log.info("stopped%s", f": {self.problem}" if self.problem else "")
        return 1 if self.problem else 0

    def _open(self) -> None:
        config, endpoint = self.config, control_endpoint(self.config.run_dir)
        if self.events is not None:
            self.events.publisher.open()
        if config.http:
            self.http = HttpProcess(config)
        if config.record is not None:
            self.recorder = _make_recorder(config, self.clock)

        def welcome(session: Session, protocol: int) -> Welcome:
            wants_events, control = self.events is not None, "" if session.tenant else endpoint
            return Welcome(
                protocol,
                self.generation,
                session.token,
                control,
                __version__,
                config.arena_bytes,
                wants_events,
                connections=CONNECTIONS_PER_SESSION,
            )

        socket_path = session_socket_path(config.run_dir)
        group = find_group(config.group)
        self.gate = SessionGate(socket_path, welcome, self, config.max_sessions, self.cache.counters, group)
        context = RequestContext(
            self.cache,
            self.generation,
            self.gate.sessions,
            self.regions,
            lease_ttl_max_s=config.lease_ttl_max_s,
            max_leases=config.max_leases_per_session,
            region_bytes=min(config.region_bytes, config.arena_bytes),
        )
        context.settings, self.cache.observers.recorder = self.settings, self.recorder
        slow = SlowRequests(config.slow_request_s, self.cache.counters)
        self.service = Service(
            context,
            self.clock,
            end=lambda session: self._later(self.gate.end, session),
            stats=lambda request: build_stats(self, request),
            slow=slow,
        )
        connections = config.max_sessions * CONNECTIONS_PER_SESSION
        self.router = Router(endpoint, self.service.handle, self.gate.cut, context.unsent, connections, group=group)
        self.remote = self._make_remote(welcome, context.unsent, connections) if config.listen else None
        context.send = self._reply
        self.service.soon = self._work_soon
        slow.queue_empty_ns = self._queue_empty_ns
        self.maker = RegionMaker(
            config.arena_bytes,
            config.region_bytes,
            config.lock_memory,
            hand_over=lambda region, fd: self._from_thread(self._add_region, region, fd),
            give_up=lambda text: self._from_thread(self._fail, text),
        )
        self.maker.start()

    def _make_remote(self, welcome: Callable[[Session, int], Welcome], unsent: Unsent, connections: int) -> RemoteGate:
        # Imported here: most daemons only serve their own host.
        from tiercache.daemon.requests.remote import RemoteGate

        counters = self.cache.counters
        return RemoteGate(
            self.config, self.gate, self.service.handle, welcome, counters, unsent, connections, self.generation
        )

    def _reply(self, identity: bytes, answer: Answer) -> None:
        """Send a deferred answer the way that its request came."""
        remote = self.remote is not None and answer.session is not None and answer.session.tenant
        (self.remote.router if self.remote is not None and remote else self.router).reply(identity, answer)

    def refused_connections(self) -> int:
        """Connections of clients and subscribers refused beyond the limits of their sockets."""
        counts = [self.router.connections.refused]
        if self.remote is not None:
            counts.append(self.remote.router.connections.refused)
        if self.events is not None:
            counts.append(self.events.publisher.refused_connections())
        return sum(counts)

    def _queue_empty_ns(self) -> int:
        """The last time that no request was waiting, as `perf_counter_ns`."""
        empty_ns = self.router.empty_ns
        return empty_ns if self.remote is None else min(empty_ns, self.remote.router.empty_ns)

    def _watch(self, parent_fd: int | None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._stopping.set)
        self.loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])  # lets in a signal sent while the daemon started
        if parent_fd is not None:
            # The parent holds the other end and never writes: readable means that it has exited.
            self.loop.add_reader(parent_fd, self._stopping.set)

    def _hang_up(self) -> None:
        """SIGHUP: reload the settings. If the controlling terminal is gone, stop, as by default."""
        try:
            os.tcgetpgrp(STDERR)
        except OSError as error:
            if error.errno == errno.EIO:
                self._stopping.set()
                return
        self._reloading = asyncio.ensure_future(self._reload())

    async def _reload(self) -> None:
        if not self._serving:  # systemd waits for that, or for the exit
            await self.settings.reload()
            return
        _notify_systemd(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            await self.settings.reload()
        finally:
            if self._serving:
                _notify_systemd("READY=1")

    def _later(self, call: Any, *args: Any) -> None:
        self.loop.call_soon(call, *args)

    def _from_thread(self, call: Any, *args: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, *args)

    def _add_region(self, region: Region, fd: int) -> None:
        self.regions[region.region_id] = region
        self.below.add_region(region, fd)
        self.gate.announce(region, fd)
        space = self.cache.space
        space.allocator.add_region(region.region_id, region.size_bytes)
        space.populating = space.allocator.arena_bytes < self.config.arena_bytes

    def _fail(self, problem: str) -> None:
        log.error("%s", problem)
        self.problem = problem
        self._stopping.set()

    def _landed(self) -> None:
        """Promoted blocks have arrived: answer the requests that wait for them."""
        self.service.reads.answer_parked()

    # --- the tick --------------------------------------------------------------------------------

    def _tick(self, slept_s: float = 0.0) -> None:
        """Every 10 ms, less often when idle: drain the queue, expire leases, and start deferred work."""
        if self._stopping.is_set():
            return
        now_s = self.clock.observe(slept_s)
        if self.cache.counters.requests != self._requests_seen or self.service.reads.parked:
            self._requests_seen = self.cache.counters.requests
            self._idle_from_s = now_s + IDLE_S
        wait_s = TICK_S if now_s < self._idle_from_s else self._idle_tick_s
        self.loop.call_later(wait_s, self._tick, wait_s)
        self.cache.counters.loop_stalls = self.clock.stalls
        self._undrained_ticks = 0 if self._drain(_TICK_REQUESTS) else self._undrained_ticks + 1
        self.router.tick()
        if self.remote is not None:
            self.remote.tick()
        # A queue that never runs empty must not keep every lease alive.
        if self._undrained_ticks in (0, _MAX_UNDRAINED_TICKS):
            self._undrained_ticks = 0
            self.cache.expire()
        self.service.reads.answer_parked()
        if self.events is not None:
            self.events.tick()
        if now_s >= self._health_log.next_s:
            self._health_log.look(health_of(self)["reasons"])
        if not self._working:
            self._work()

    def _work_soon(self) -> None:
        """Schedule `_work` before the next tick."""
        if not self._working and not self._stopping.is_set():
            self._working = True
            self._later(self._work)

    def _work(self) -> None:
        """Run a slice of deferred work; the loop serves others before the next one."""
        self._working = False  # a slice that fails is tried again at the next tick
        if self._over:
            return
        more = self.cache.work()
        if self._serving:
            more = self.service.reads.answer_parked() or more
        self._working = more
        if more:
            self._later(self._work)

    # --- what the gate tells ---------------------------------------------------------------------

    def _drain(self, limit: int) -> bool:
        drained = self.router.drain(limit)
        return drained if self.remote is None else self.remote.router.drain(limit) and drained

    def session_ended(self, session: Session) -> None:
        """A session has ended. Its last requests may still be queued: a release among them should be handled first."""
        self._drain(DRAIN_REQUESTS)
        self.cache.session_lost(session.owner)

    def process_ended(self, session: Session) -> None:
        self.cache.process_gone(session.owner)

    def has_quarantine(self, session: Session) -> bool:
        return self.cache.has_quarantine(session.owner)

    def _close(self) -> None:
        self.maker.stop()
        self.gate.close()
        self.router.close()
        if self.remote is not None:
            self.remote.close()


def _make_events(config: DaemonConfig) -> Events:
    steps = config.kv_events_buffer
    connects = config.kv_events_connect
    return Events(
        Publisher(config.kv_events, config.kv_events_replay, config.kv_events_topic, steps, connects=connects)
    )


def _make_recorder(config: DaemonConfig, clock_s: Callable[[], float]) -> Recorder:
    # Imported here: most daemons record nothing.
    from tiercache.daemon.observe.recorder import Recorder

    return Recorder(config, clock_s)


def _notify_systemd(state: str) -> None:
    """Tell systemd the state of the service, if it asked (`Type=notify`)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    import socket

    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(state.encode(), address)
        except OSError as error:
            log.warning("systemd could not be told %s: %s", state, error.strerror)
