"""How direct loads and stores treat each answer of the daemon; without a daemon, a disk or a GPU."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiercache.connector.blocks import Blocks, LeasedBlocks, NewBlocks
from tiercache.connector.direct import stores as direct_store
from tiercache.connector.direct.loads import load_direct
from tiercache.connector.direct.stores import _DirectStore
from tiercache.copies.pool import CopyLost, Limit
from tiercache.errors import ProtocolError
from tiercache.protocol.messages import NO_LEASE, Abort, BadExtent, CommitState, Extent, pack_extents

KEYS = bytes(range(256))  # 16 blocks
PLACE = Extent(0, 0, 0, 0, 0, 4096, 4096, 0)


class Session:
    """Gives the test's answers in order, and records the requests."""

    generation = 1
    welcome = SimpleNamespace(kv_events=False)

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Any, dict[str, Any]]] = []

    def call(self, request: Any, **fields: Any) -> Any:
        self.asked.append((request, fields))
        if request in (Abort, BadExtent):
            return None
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def namespace_id(self, spec: Any) -> int:
        return 1

    def fileno(self) -> int:
        return 3

    def of(self, request: Any) -> list[dict[str, Any]]:
        return [fields for kind, fields in self.asked if kind is request]


def extents(first: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(first=first, extents=pack_extents([PLACE] * count), directories=["/d"])


def load(session: Session, good: int, bad: bool = False) -> int:
    loader: Any = SimpleNamespace(off=False, pool=SimpleNamespace(block_bytes=4096))
    loader.load = lambda *_: SimpleNamespace(good=good, bad=bad)
    leased = LeasedBlocks(session, 7, 1)  # type: ignore[arg-type]
    return load_direct(leased, loader, "print", KEYS, Blocks(np.arange(4), 3, Limit()))


def test_a_direct_load_takes_no_other_extents_than_it_has_asked_for() -> None:
    assert load(Session(extents(3, 4)), 4) == 4
    for wrong in (extents(2, 4), extents(3, 5)):
        with pytest.raises(ProtocolError, match="other extents"):
            load(Session(wrong), 4)


class Writer:
    """A store of four blocks, and what became of its lease."""

    def __init__(self, session: Session, sums: Any = (1, 2, 3, 4)) -> None:
        self.session, self.limit = session, Limit()
        self.let_go: list[int] = []
        leases = SimpleNamespace(keep=lambda *_, **__: None, let_go=self.let_go.append)

        def write(*_: Any) -> Any:
            if isinstance(sums, Exception):
                raise sums
            return list(sums)

        storer = SimpleNamespace(store=write, pool=SimpleNamespace(block_bytes=4096), note=lambda text: None)
        spec = SimpleNamespace(fingerprint=lambda: "print", block_size=4)
        client = SimpleNamespace(leases=leases, session=lambda: session)
        self.blocks = NewBlocks(np.arange(4), 0, self.limit, None, KEYS)
        self.store = _DirectStore(client, storer, spec, self.blocks)  # type: ignore[arg-type]

    def write(self, places: int = 4) -> tuple[int, int, int]:
        granted: Any = SimpleNamespace(lease=7, directory="/d", extents=pack_extents([PLACE] * places))
        return self.store.write(granted, self.blocks)

    @property
    def aborted(self) -> list[bool]:
        return [fields["finished"] for fields in self.session.of(Abort)]


def committed(*states: int) -> SimpleNamespace:
    return SimpleNamespace(states=bytes(states))


def test_what_was_written_is_committed_and_the_lease_ends_with_that() -> None:
    visible = int(CommitState.VISIBLE)
    writer = Writer(Session(committed(visible, visible, visible + 1, visible)))
    assert writer.write() == (4, 4, 2), "the leading ones that are visible"
    assert (writer.aborted, writer.let_go) == ([], [7])


@pytest.mark.parametrize("places", [0, 5])
def test_more_or_fewer_places_than_can_be_are_given_back(places: int) -> None:
    writer = Writer(Session())
    with pytest.raises(ProtocolError, match=f"granted {places} places where 4"):
        writer.write(places)
    assert (writer.aborted, writer.let_go) == ([True], [7])


def test_a_write_that_is_lost_is_not_said_to_be_finished_and_an_answer_about_others_is_refused() -> None:
    writer = Writer(Session(), CopyLost("as the test wants it"))
    with pytest.raises(CopyLost):
        writer.write()
    assert writer.aborted == [False]
    writer = Writer(Session(committed(1)))
    with pytest.raises(ProtocolError, match="4 blocks were committed and 1 answered"):
        writer.write()


def reserved(present: int, lease: int = NO_LEASE, soon: bool = False) -> SimpleNamespace:
    return SimpleNamespace(present=present, lease=lease, soon=soon)


def test_a_place_that_comes_soon_is_asked_for_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", lambda s: now_s.__setitem__(0, now_s[0] + direct_store.PATIENCE_S))
    writer = Writer(Session(reserved(0, soon=True), reserved(1, lease=7)))
    assert writer.store.reserve(writer.blocks) == reserved(1, lease=7)
    writer = Writer(Session(*[reserved(0, soon=True)] * 9))
    assert writer.store.reserve(writer.blocks) == reserved(0, soon=True)
    assert 1 < len(writer.session.asked) < 5
    writer = Writer(Session(reserved(5, lease=7)))
    with pytest.raises(ProtocolError, match="more blocks than it was asked about"):
        writer.store.reserve(writer.blocks)
    assert writer.aborted == [True]
