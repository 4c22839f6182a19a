"""A real daemon, and caches in front of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import tiercache
from tiercache.connectors.transformers_cache import PrefixCache


@pytest.fixture(scope="module")
def daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch("64MiB", region="16MiB") as daemon:
        yield daemon


@pytest.fixture
def open_cache(daemon: tiercache.LaunchedDaemon) -> Iterator[Callable[..., PrefixCache]]:
    """Makes caches in front of models, closed at the end. The daemon is empty at first."""
    with tiercache.Client.connect(daemon.address) as client:
        client.flush()
    with ExitStack() as stack:

        def make(model: Any, **options: Any) -> PrefixCache:
            options.setdefault("required", True)
            options.setdefault("request_timeout_s", 60.0)
            return stack.enter_context(PrefixCache(model, options.pop("address", daemon.address), **options))

        yield make
