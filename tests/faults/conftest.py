"""Daemons and clients for the fault tests; every process ends with its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fault_engine import Engine
from fault_peer import Peer
from fault_processes import Child, Daemon

from tiercache.protocol.namespaces import NamespaceSpec


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes what is given to it, last first, after the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_daemon(closing: ExitStack) -> Callable[..., Daemon]:
    """Start a daemon: flags as on the command line; small by default."""

    def start(*flags: str, **settings: Any) -> Daemon:
        daemon = Daemon(*(flags or ("--arena", "16MiB", "--region", "4MiB")), **settings)
        closing.callback(daemon.close)
        return daemon.start()

    return start


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon of 16 MiB in 4 regions."""
    return start_daemon()


@pytest.fixture
def connect(closing: ExitStack) -> Callable[..., Peer]:
    """A hand-made client of a daemon in this process."""
    return lambda daemon, **settings: closing.enter_context(Peer(daemon.run_dir, **settings))


@pytest.fixture
def engine_of(closing: ExitStack) -> Callable[..., Engine]:
    """A connector with a pool in this process."""

    def make(daemon: Daemon | str, spec: NamespaceSpec, blocks: int = 64, **settings: Any) -> Engine:
        run_dir = daemon if isinstance(daemon, str) else daemon.run_dir
        return closing.enter_context(Engine(run_dir, spec, blocks, **settings))

    return make


@pytest.fixture
def start_child(closing: ExitStack) -> Callable[..., Child]:
    """A client in a process of its own."""

    def start(kind: str, daemon: Daemon | str, **settings: Any) -> Child:
        child = Child(kind, daemon if isinstance(daemon, str) else daemon.run_dir, **settings)
        closing.callback(child.close)
        child.do("begin")
        return child

    return start
