"""One daemon with an HTTP port for all tests that do not kill it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from http_helpers import connect, request, url_in
from waiting import wait_until

import tiercache

sys.path.append(str(Path(__file__).parents[2] / "bench"))
"""The browser of the page's tests is that of the benchmarks."""


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiercache.LaunchedDaemon]:
    log = tmp_path_factory.mktemp("http") / "log"
    with tiercache.launch("32MiB", region="8MiB", policy="lru", http="127.0.0.1:0", log=log) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def url(daemon: tiercache.LaunchedDaemon) -> str:
    found = url_in(Path(daemon.log))
    wait_until(lambda: request(f"{found}/healthz").status == 200, "it has found its daemon")
    return found


@pytest.fixture
def client(daemon: tiercache.LaunchedDaemon) -> Iterator[tiercache.Client]:
    """A client of a daemon that has forgotten everything."""
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        client.flush()
        yield client


@pytest.fixture
def opened(client: tiercache.Client) -> Iterator[Callable[[tiercache.NamespaceSpec], tiercache.Connector]]:
    """Connectors to the daemon that are closed at the end."""
    with ExitStack() as stack:
        yield lambda namespace: stack.enter_context(connect(client.address, namespace))
