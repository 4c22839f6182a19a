"""Threads that a daemon starts, and the processes beside it whose memory counts.

ZeroMQ aborts the process if it cannot start its threads, and a part of the daemon without its thread does nothing: so
the daemon asks for all of them before it serves.
"""

from __future__ import annotations

from tiercache.config.daemon_config import DaemonConfig
from tiercache.copies.arena import Beside
from tiercache.daemon.tiers.nvme.opening.worker_choice import worker_processes
from tiercache.daemon.tiers.shared.stores.folder.settings import CONNECTIONS, parse_folder_url
from tiercache.errors import ConfigError

_OWN = 12
"""Regions, ZeroMQ's two, and those that come and go: reading settings, ending processes, resolving names."""
_ZEROMQ = 2
"""Of each further context: one for I/O, one that closes sockets."""
_PER_DIRECTORY = 13
"""Eight that move blocks, one for files, one or two for SQLite, and two that open it or look after it."""
_PER_WORKER = 3
"""For a directory with a process of its own: what starts the process, its tasks, and one that opens it."""
_OF_WORKER, _OF_HTTP, _OF_HELPER = 14, 8, 4
"""Threads of the children, which the same limit counts; those of a store's helper beside its lines."""
_LOOKUP_LINES = 2
_SHARED = 3
"""Beside its lines: a helper process or an event loop of the store."""


def threads_needed(config: DaemonConfig, shared_connections: int = 0) -> int:
    """The most threads that the daemon and its children have beside the first and that of the log.

    shared_connections: of the shared store, if there is one.
    """
    directories = len(config.nvme_dirs)
    beside = beside_arena(config)
    lines = _LOOKUP_LINES + shared_connections
    return (
        _OWN
        + directories * (_PER_WORKER + _OF_WORKER if beside.workers else _PER_DIRECTORY)
        + (lines + _SHARED if config.shared else 0)
        + (lines + _OF_HELPER if beside.folder_connections else 0)
        + (_ZEROMQ if config.kv_events else 0)
        + (_ZEROMQ + 1 if config.listen else 0)  # and what checks keys
        + (1 + _OF_HTTP if config.http else 0)
        + (config.record is not None)
    )


def beside_arena(config: DaemonConfig, directories: int | None = None) -> Beside:
    """What needs memory beside the arena; `directories`: of a running daemon, if these are not the settings'."""
    count = len(config.nvme_dirs) if directories is None else directories
    workers = worker_processes(config.nvme_workers, count)
    return Beside(workers=workers, http=bool(config.http), folder_connections=_folder_connections(config.shared.full))


def _folder_connections(url: str) -> int:
    """Connections of a shared folder; 0 for other stores and none."""
    if not url.startswith("file:"):
        return 0
    try:
        return parse_folder_url(url).connections
    except ConfigError:  # who opens the store is told
        return CONNECTIONS
