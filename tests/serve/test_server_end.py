"""The server's process: its limit of open files, and the end of requests when the time is up."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from service_alone import bare_service

from tiercache.engine.async_engine import Stopping
from tiercache.serve import server
from tiercache.serve.app import build_app

pytestmark = pytest.mark.engine


def test_it_may_have_as_many_connections_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = server._MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, server._MAX_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        server._allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        server._allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard), "the limit is never lowered"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_when_the_time_is_up_requests_fail_and_half_requests_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    cut: list[object] = []
    monkeypatch.setattr(server, "cut_unsent", cut.append)
    engine: Any = SimpleNamespace(end=ended.append)
    ours = server._Uvicorn(uvicorn.Config(build_app(bare_service())), engine, 1.0)
    ours.end_requests()
    assert cut == [ours.server_state.connections]
    assert [type(error) for error in ended] == [Stopping]
    assert "send the request again" in str(ended[0])
