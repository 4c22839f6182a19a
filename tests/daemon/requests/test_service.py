"""Requests in slices, and what is refused before it takes time."""

from __future__ import annotations

from collections import Counter
from typing import cast

import msgpack
import pytest

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.requests import service
from tiercache.daemon.requests.service import MAX_SLICED, Service
from tiercache.daemon.requests.sessions import Session
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
