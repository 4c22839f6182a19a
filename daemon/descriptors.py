"""File descriptors: how many a daemon may need, and what to do if the process may not have as many.

ZeroMQ aborts the process when a peer connects to a unix socket and no descriptor is left, so the limit must never be
reached. Everything that takes descriptors is counted here, at the most that its own limit allows.
"""

from __future__ import annotations

import dataclasses
import logging
import resource

from tiercache.config.daemon_config import DaemonConfig
from tiercache.daemon.events.publisher import MAX_SUBSCRIBERS
from tiercache.daemon.ground.connections import UNSEEN_EVENTS
from tiercache.daemon.requests.sessions import MAX_GREETING
from tiercache.daemon.tiers.nvme.opening.worker_choice import worker_processes
from tiercache.errors import ConfigError

log = logging.getLogger("tiercache.daemon")

CONNECTIONS_PER_SESSION = 16
"""To each control socket (this host's, and the TCP one), per allowed session; sessions are told at their hello."""
_PER_SESSION = 3
"""Its socket, its pidfd, and one for a process whose session has ended with frames in quarantine."""
_PER_DIRECTORY = 24
"""Lock, SQLite's connections with their logs, and files opened for a moment."""
_OWN = 96
"""Log, event loop, ZeroMQ's threads, the HTTP process's pipe, and files opened for a moment."""
_LEAST_SESSIONS = 4
_ENOUGH = 1 << 20
"""Used where there is no limit at all."""


def raise_limit() -> int:
    """Raise the limit as far as the system allows; returns the limit that there is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # a sandbox may refuse even what the hard limit allows
            log.warning("the limit of open files stays at %d: setrlimit: %s", soft, error)
            return soft
    return wanted


def needed(
    sessions: int,
    *,
    regions: int,
    directories: int = 0,
    segments: int = 0,
    has_workers: bool = False,
    remote: bool = False,
    event_sockets: int = 0,
) -> int:
    """The most descriptors that a daemon has open; `has_workers`: beside worker processes, which get its regions."""
    control_sockets = 1 + remote
    return (
        _OWN
        + regions * (1 + has_workers)
        + directories * _PER_DIRECTORY
        + segments
        + MAX_GREETING
        + sessions * _PER_SESSION
        + control_sockets * (sessions * CONNECTIONS_PER_SESSION + UNSEEN_EVENTS)
        + event_sockets * (MAX_SUBSCRIBERS + UNSEEN_EVENTS)
    )


def fit(config: DaemonConfig, limit: int, *, quiet: bool = False) -> DaemonConfig:
    """The settings with as many sessions as `limit` descriptors suffice for. Raises ConfigError for too few.

    Logs it if these are fewer than asked for, unless `quiet`.
    """

    def takes(sessions: int) -> int:
        directories = len(config.nvme_dirs)
        segments = config.nvme_bytes // config.nvme_segment_bytes + directories if directories else 0
        event_sockets = bool(config.kv_events) + bool(config.kv_events_replay)
        return needed(
            sessions,
            regions=len(config.region_sizes()),
            directories=directories,
            segments=segments,
            has_workers=worker_processes(config.nvme_workers, directories) > 0,
            remote=bool(config.listen),
            event_sockets=event_sockets,
        )

    wanted = takes(config.max_sessions)
    if wanted <= limit:
        return config
    remedy = f"raise the limit to {wanted} (ulimit -Hn, LimitNOFILE= of a systemd unit)"
    each = takes(1) - takes(0)
    sessions = (limit - takes(0)) // each
    least = min(_LEAST_SESSIONS, config.max_sessions)
    if sessions < least:
        text = f"this process may open {limit} files, and the daemon needs {takes(least)} for {least} clients alone"
        raise ConfigError(f"{text}: {remedy}")
    log.log(
        logging.DEBUG if quiet else logging.WARNING,
        "max_sessions is %d instead of %d, since this process may open %d files: %s",
        sessions,
        config.max_sessions,
        limit,
        remedy,
    )
    return dataclasses.replace(config, max_sessions=sessions)
