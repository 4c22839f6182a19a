"""Flushes of very many namespaces: some in a slice, each in both tiers at once, and to the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from cache_rig import CacheRig, finish
from chains import chain_of
from raw_client import Client, block_of, new_chain
from waiting import wait_until

from tiercache.daemon.cache import FLUSHED_AT_ONCE, KEYS_FLUSHED_AT_ONCE
from tiercache.daemon.ground.slices import AnswerNow, Steps
from tiercache.daemon.requests.service import MAX_SLICED, Service
from tiercache.daemon.requests.sessions import Session
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import KEY_BYTES, Hello

MANY = 2 * FLUSHED_AT_ONCE + 10


class Below:
    """A tier below that records what DRAM still has of the namespaces that it is told to flush."""

    end: Callable[[], None]

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.forget = self._forget

    def _forget(self, namespaces: Sequence[Namespace]) -> None:
        self.parts.append([namespace.table.blocks for namespace in namespaces])


def test_many_namespaces_are_flushed_in_slices() -> None:
    h, below = CacheRig(regions=1), Below()
    spaces = [h.space(rank=rank, layers=layers) for rank in range(8) for layers in range(1, 20)][:MANY]
    for place in (0, FLUSHED_AT_ONCE, MANY - 1):
        h.store(spaces[place], chain_of(place + 1, 2))
    steps, parts = h.cache.flush(spaces, b"", below), list[int]()
    late = chain_of(99, 1)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            gone, _ = end.value
            break
        parts.append(len(below.parts))
        h.store(spaces[0], late) if len(parts) == 1 else None
        h.check()
    assert parts == [1, 2], "a part of both tiers in each slice"
    assert [len(part) for part in below.parts] == [FLUSHED_AT_ONCE, FLUSHED_AT_ONCE, 10]
    assert all(set(part) == {0} for part in below.parts), "no block of it could be promoted or written again"
    assert gone == 6
    assert h.cache.counters.flushes == 1
    assert h.cache.match(h.owner, [spaces[0]], late, 0).dram == 1, "a block that was stored after the flush stays"
    finish(h)


def test_a_key_of_many_namespaces_is_flushed_in_smaller_slices() -> None:
    h, below = CacheRig(regions=1), Below()
    spaces = [h.space(rank=rank) for rank in range(2 * KEYS_FLUSHED_AT_ONCE + 1)]
    keys = chain_of(1, 2)
    h.store(spaces[-1], keys)
    steps = h.cache.flush(spaces, keys[:KEY_BYTES], below)
    next(steps)
    assert [len(part) for part in below.parts] == [KEYS_FLUSHED_AT_ONCE]
    next(steps)
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value[0] == 2
    assert below.parts[2] == [0]
    finish(h)


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


def test_a_request_that_has_done_its_work_is_answered_instead_of_refused() -> None:
    """The blocks of a commit that only waits for them become visible all the same."""
    service, session = Service.__new__(Service), Session(Hello(1, 1, bytes(16), "s", 0, False), "p")
    service._sliced = Counter({session: MAX_SLICED})
    done = m.Done(1, 1)

    def commit() -> Steps[m.Reply | None]:
        with suppress(AnswerNow):
            yield
        return done

    assert service._begin(session, m.Ping(1, b"", 1, 0), commit()) is done
    assert service._sliced == {session: MAX_SLICED}
