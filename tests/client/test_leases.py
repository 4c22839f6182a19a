"""Leases of one client: renewed while in use, released when their holder is gone, never held for ever."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.client.leases import HOLD_AT_MOST_S, Leases
from tiercache.client.session import Session
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
        self.fails = False

    def call(self, request: Any, *, leases: list[int], ttl_ms: int) -> Renewed:
        if self.fails:
            raise DeadlineExceeded("no answer")
        self.renewed += leases
        return Renewed(1, 1, b"\1" * len(leases))

    def give_back(self, request: Any, **fields: Any) -> None:
        self.given_back.append((request, fields))


def test_a_lease_is_renewed_at_half_its_time_and_for_ten_minutes_at_most() -> None:
    now_s = [100.0]
    held, session, holder = Leases(lambda: now_s[0]), FakeSession(), Holder()
    held.keep(session, 7, 10_000, holder, writing=False)  # type: ignore[arg-type]
    for elapsed_s, renewals in ((4.0, 0), (1.5, 1), (4.0, 1), (1.5, 2)):
        now_s[0] += elapsed_s
        assert held.until_next_renewal_s() <= 1.0
        held.renew(session)  # type: ignore[arg-type]
        assert session.renewed == [7] * renewals
    session.fails = True  # one whose renewal had no answer is renewed again at once
    now_s[0] += 6.0
    with pytest.raises(DeadlineExceeded):
        held.renew(session)  # type: ignore[arg-type]
    session.fails = False
    held.renew(session)  # type: ignore[arg-type]
    assert session.renewed == [7] * 3
    now_s[0] += HOLD_AT_MOST_S
    held.renew(session)  # type: ignore[arg-type]
    assert session.renewed == [7] * 3
    assert held.until_next_renewal_s() == 1.0, "no lease is left"


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
    session.call = lambda request, **fields: asked.append((request, fields["lease"]))  # type: ignore
    session._clock_differs = False
    leases_of: Any = deque()
    session._owner = SimpleNamespace(errands=leases_of)  # type: ignore[assignment]
    for lease, (generation, token) in enumerate([(5, b"ours"), (5, b"former"), (4, b"former")]):
        for request in (Release, Abort):
            leases_of.append((generation, token, request, {"lease": lease}))
    assert session.settle() is False
    assert asked == [(Release, 0), (Abort, 0), (Abort, 1)]
    assert not leases_of
