"""Flushes of very many namespaces: some in a slice, each in both tiers at once, and to the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from raw_client import Client, block_of, new_chain
from waiting import wait_until

from tiercache.daemon.cache import FLUSHED_AT_ONCE
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.requests.service import MAX_SLICED, Service
from tiercache.daemon.requests.sessions import Session
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import Hello

MANY = 2 * FLUSHED_AT_ONCE + 10


def test_a_flush_goes_on_when_its_client_has_gone(client: Client, run_dir: Path) -> None:
    numbers = [client.namespace(tp_rank=rank % 4, tp_size=4, engine=f"e{rank}") for rank in range(MANY)]
    keys = new_chain(1)
    client.store(numbers[-1], keys, [block_of(0)])
    with Client(run_dir) as leaver:
        leaver.send("flush", "dram", [], b"")
        leaver.leave()
    wait_until(lambda: not client.ask("peek", numbers[-1:], keys)[1], "the last namespace is flushed")
    assert client.ask("check")[1] == []


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
