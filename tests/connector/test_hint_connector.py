"""Hints by way of a connector and a real daemon, and what a hint may say at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from chains import chain_of
from waiting import wait_until

import tiercache
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import MAX_HINT_MS, Priority

Open = Callable[..., tiercache.Connector]
WAIT_S = 15.0
"""Deadline of an answer on a busy machine."""


def found(connector: tiercache.Connector, chain: bytes) -> int:
    """How many blocks a match finds; it is released at once."""
    match = connector.match(chain)
    connector.release(match)
    return match.blocks


def test_what_is_stored_for_a_while_is_gone_after_it(open_connector: Open) -> None:
    connector = open_connector(request_timeout_s=WAIT_S)
    chain, other = chain_of("for a while", 6), chain_of("for longer", 3)
    connector.store(other, [0, 1, 2])
    assert connector.store(chain, range(6), hint=Hint(ttl_s=0.2)).stored == 6
    wait_until(lambda: found(connector, chain) == 0)
    assert found(connector, other) == 3
    assert said(connector)["expired_blocks"] >= 6
    assert connector.counters["hints"] == 1


def test_a_hint_is_about_what_is_here(open_connector: Open) -> None:
    connector = open_connector(request_timeout_s=WAIT_S)
    chain = chain_of("partly here", 5)
    connector.store(chain[:48], range(3))
    assert connector.hint(chain, Hint(return_in_s=30)) == 3
    assert connector.hint(chain_of("nowhere", 5), Hint(done=True)) == 0
    assert connector.hint(b"", Hint(done=True)) == 0
    with pytest.raises(ValueError, match="16 bytes"):
        connector.hint(b"abc", Hint(done=True))
    with pytest.raises(ValueError, match="first is -1"):
        connector.hint(chain, Hint(done=True), first=-1)
    assert connector.counters["failures"] == 0


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["return_in_s", "ttl_s"])
def test_a_time_is_a_positive_number(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=name):
        Hint(**{name: seconds})  # type: ignore[arg-type]


def test_what_a_hint_may_say() -> None:
    with pytest.raises(ValueError, match="give only one of them"):
        Hint(done=True, return_in_s=3)
    with pytest.raises(ValueError, match="says nothing"):
        Hint()
    with pytest.raises(ValueError, match="7 is not a valid"):
        Hint(priority=7)  # type: ignore[arg-type]
    assert Hint(ttl_s=1e300).fields() == {"done": False, "return_in_ms": 0, "ttl_ms": MAX_HINT_MS, "priority": 0}
    assert Hint(return_in_s=1e-9, priority=Priority.HIGH).fields()["return_in_ms"] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Hint(done=True).done = False  # type: ignore[misc]
