"""Requests in slices, and what is refused before it takes time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import msgpack
import msgspec
import pytest
from cache_at_once import CacheAtOnce
from context_rig import context_of
from tenant_cache import open_for

from tiercache.daemon.ground.clock import LeaseClock
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.requests import service
from tiercache.daemon.requests.service import MAX_SLICED, Service
from tiercache.daemon.requests.sessions import Session
from tiercache.daemon.requests.slow import SlowRequests
from tiercache.daemon.tiers.dram.below import TierBelow
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import Hello


def test_a_flush_that_is_refused_has_flushed_nothing() -> None:
    """A session with too many long requests is refused before the first slice."""
    service, session = Service.__new__(Service), Session(Hello(1, 1, bytes(16), "s", 0, False), "p")
    service._sliced = Counter({session: MAX_SLICED})
    begun: list[str] = []

    def steps(what: str) -> Steps[m.Reply | None]:
        begun.append(what)
        yield
        return None

    for request in (m.Flush(1, b"", 1, 0, "all", [], b""), m.Ping(1, b"", 1, 0)):
        with pytest.raises(RequestRefused, match="long requests of this session"):
            service._begin(session, request, steps(type(request).__name__))
    assert begun == ["Ping"], "other requests are found to be long only once they have begun"
    assert service._sliced == {session: MAX_SLICED}


@pytest.mark.parametrize("start", [b"\x96", b"\xdc\0\x06", b"\xdd\0\0\0\x06"], ids=["fix", "16", "32"])
def test_a_spec_of_megabytes_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """Building its names would hold the loop for a tenth of a second."""
    monkeypatch.setattr(service, "_decode", lambda header: pytest.fail("it was built"))
    header = start + msgpack.packb("register_namespace") + bytes(service.MAX_REGISTER_BYTES)
    with pytest.raises(RequestRefused, match="the spec is longer than 8192 bytes"):
        service.Service._decode(cast(service.Service, None), header)


def test_all_requests_that_wait_for_the_shared_store_count_as_parked() -> None:
    """A match and a prefetch: one limit for a session, and one figure."""
    waiting = list[Callable[[], None]]()

    class Slow(TierBelow):
        may_extend = True

        def wait(self, *asked: Any) -> bool:
            waiting.append(asked[-1])
            return True

    context, session = context_of("")
    context.cache = CacheAtOnce(lambda: 0.0, below=Slow())
    nothing: Any = None
    served = Service(context, LeaseClock(), nothing, nothing, SlowRequests(0.0, Counters()))
    number = open_for(context.cache, "").number
    for kind in (m.Match, m.Prefetch):
        request = kind(1, session.token, 1, 1 << 62, [number], bytes(16))
        assert served.handle(b"", msgspec.msgpack.encode(request), []) is None
    assert (len(waiting), served.reads.parked) == (2, 2)
    for go in waiting:
        go()
    assert served.reads.parked == 0
