"""Leases of one client: renewed while in use, released when their holder is gone, never held for ever."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.client import leases
from tiercache.client.leases import HOLD_AT_MOST_S, Leases
from tiercache.client.session import Session
from tiercache.connector import connector
from tiercache.copies.pool import Limit
from tiercache.errors import DaemonUnavailable, DeadlineExceeded
from tiercache.protocol.messages import Abort, Release, Renewed


class Holder:
    """Something that uses a lease."""


class FakeSession:
    """Records its requests."""

    def __init__(self) -> None:
        self.renewed: list[int] = []
        self.given_back: list[tuple[Any, dict[str, Any]]] = []
        self.alive = b"\1" * 9

    def call(self, request: Any, expect: Any, *, leases: list[int], ttl_ms: int) -> Renewed:
        self.renewed += leases
        return Renewed(1, 1, self.alive[: len(leases)])

    def give_back(self, request: Any, **fields: Any) -> None:
        self.given_back.append((request, fields))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_a_lease_is_renewed_at_half_its_time_and_for_ten_minutes_at_most(clock: SimpleNamespace) -> None:
    held, session, holder = Leases(), FakeSession(), Holder()
    held.keep(session, 7, 10_000, holder, writing=False)  # type: ignore[arg-type]
    for elapsed_s, renewals in ((4.0, 0), (1.5, 1), (4.0, 1), (1.5, 2)):
        clock.now_s += elapsed_s
        held.renew(session)  # type: ignore[arg-type]
        assert session.renewed == [7] * renewals
    clock.now_s += HOLD_AT_MOST_S
    held.renew(session)  # type: ignore[arg-type]
    assert session.renewed == [7, 7]
    assert held.until_next_renewal_s() == 1.0, "no lease is left"


def test_a_lease_whose_renewal_had_no_answer_is_renewed_again_at_once(clock: SimpleNamespace) -> None:
    """Not only after half of its time from then on: it would be over by then."""
    held, session, holder = Leases(), FakeSession(), Holder()
    held.keep(session, 7, 10_000, holder, writing=False)  # type: ignore[arg-type]
    clock.now_s += 5.0
    answer, session.call = session.call, fail  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded):
        held.renew(session)  # type: ignore[arg-type]
    session.call = answer  # type: ignore[method-assign]
    held.renew(session)  # type: ignore[arg-type]
    held.renew(session)  # type: ignore[arg-type]
    assert session.renewed == [7]


def fail(*_: Any, **__: Any) -> Any:
    raise DeadlineExceeded("no answer")


def test_what_its_holder_has_forgotten_is_ended_as_it_should_be(clock: SimpleNamespace) -> None:
    held, session = Leases(), FakeSession()
    for lease, writing in ((1, False), (2, True)):
        held.keep(session, lease, 10_000, Holder(), writing=writing)  # type: ignore[arg-type]
    held.renew(session)  # type: ignore[arg-type]
    assert session.given_back == [(Release, {"lease": 1}), (Abort, {"lease": 2, "finished": True})]


def test_a_lease_that_is_over_or_of_another_session_is_not_renewed_again(clock: SimpleNamespace) -> None:
    held, session, other, holder = Leases(), FakeSession(), FakeSession(), Holder()
    held.keep(session, 1, 10_000, holder, writing=False)  # type: ignore[arg-type]
    held.keep(other, 2, 10_000, holder, writing=False)  # type: ignore[arg-type]
    session.alive = b"\0"
    for _ in range(3):
        clock.now_s += 6
        held.renew(session)  # type: ignore[arg-type]
    assert session.renewed == [1]
    assert (other.renewed, other.given_back) == ([], [])


def test_what_is_under_way_is_stopped_and_nothing_else_begins() -> None:
    held, limit = Leases(), Limit()
    with held.operation(limit):
        assert not held.wait_idle(0)
        held.stop()
        assert limit.reached()
    assert held.wait_idle(0)
    with pytest.raises(DaemonUnavailable, match="closed"), held.operation(Limit()):
        pass


def test_errands_go_to_the_daemon_that_granted_the_lease_and_to_no_other() -> None:
    asked: list[tuple[Any, int]] = []
    session = Session.__new__(Session)
    session.generation = 5
    session.welcome = SimpleNamespace(session=b"ours")  # type: ignore[assignment]
    session._channels = SimpleNamespace(collect_late=lambda: False)  # type: ignore[assignment]
    session.call = lambda request, expect, **fields: asked.append((request, fields["lease"]))  # type: ignore
    session._clock_differs = False
    leases_of: Any = deque()
    session._owner = SimpleNamespace(errands=leases_of)  # type: ignore[assignment]
    for lease, (generation, token) in enumerate([(5, b"ours"), (5, b"former"), (4, b"former")]):
        for request in (Release, Abort):
            leases_of.append((generation, token, request, {"lease": lease}))
    assert session.settle() is False
    assert asked == [(Release, 0), (Abort, 0), (Abort, 1)]
    assert not leases_of


def test_stores_ramp_up_after_the_daemon_was_away() -> None:
    ours = connector.Connector.__new__(connector.Connector)
    client = SimpleNamespace(warmth=1.0)
    ours._client = client  # type: ignore[assignment]
    ours.namespace = SimpleNamespace(block_bytes=connector.RAMP_FLOOR_BYTES // 4)  # type: ignore[assignment]
    assert ours._admitted(100) == 100
    for client.warmth, admitted in ((0.5, 50), (0.01, 4), (0.0, 4)):
        assert ours._admitted(100) == admitted
    assert ours._admitted(3) == 3
