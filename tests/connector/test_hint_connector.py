"""Hints by way of a connector and a real daemon, and what a hint may say at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from chains import chain_of
from connector_helpers import spec
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


def said(connector: tiercache.Connector) -> dict[str, Any]:
    return dict(connector.stats()["daemon"]["hints"])


def test_what_is_stored_for_a_while_is_gone_after_it(open_connector: Open) -> None:
    connector = open_connector(request_timeout_s=WAIT_S)
    chain, other = chain_of("for a while", 6), chain_of("for longer", 3)
    connector.store(other, [0, 1, 2])
    assert connector.store(chain, range(6), hint=Hint(ttl_s=0.2)).stored == 6
    wait_until(lambda: found(connector, chain) == 0)
    assert found(connector, other) == 3
    assert said(connector)["expired_blocks"] >= 6
    assert connector.counters["hints"] == 1


def test_a_store_in_the_background_says_it_too(open_connector: Open) -> None:
    connector = open_connector(request_timeout_s=WAIT_S)
    chain, before = chain_of("in the background", 4), said(connector)
    transfer = connector.store_async(chain, range(4), hint=Hint(done=True, priority=Priority.LOW))
    assert transfer.result().stored == 4
    now = said(connector)
    assert {name: now[name] - before[name] for name in ("hints", "done", "returning", "ttl", "priority")} == {
        "hints": 1,
        "done": 1,
        "returning": 0,
        "ttl": 0,
        "priority": 1,
    }
    assert found(connector, chain) == 4, "the blocks stay until room is needed"


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


def test_all_ranks_are_told_at_once(open_connector: Open) -> None:
    form = {"tp_size": 2}
    ranks = [spec(tp_rank=rank, **form) for rank in range(2)]
    first, second = (open_connector(namespace=namespace, request_timeout_s=WAIT_S) for namespace in ranks)
    chain = chain_of("both ranks", 3)
    first.store(chain, range(3))
    second.store(chain[:32], range(2))
    assert first.hint(chain, Hint(ttl_s=0.2), namespaces=ranks) == 3
    wait_until(lambda: found(first, chain) + found(second, chain) == 0)


def test_a_daemon_of_an_earlier_release_is_not_asked(open_connector: Open) -> None:
    connector = open_connector(request_timeout_s=WAIT_S)
    session = connector.client.session()
    session.welcome = msgspec.structs.replace(session.welcome, hints=False)
    before, chain = said(connector), chain_of("earlier", 2)
    assert connector.store(chain, range(2), hint=Hint(done=True)).stored == 2
    assert connector.hint(chain, Hint(done=True)) == 0
    assert said(connector) == before
    assert (connector.counters["failures"], connector.counters["hints"]) == (0, 0)


def test_without_a_daemon_a_hint_is_nothing() -> None:
    with tiercache.launch("16MiB", region="8MiB") as daemon:
        connector = tiercache.connect(daemon.address, namespace=spec(), required=True)
    with connector:
        wait_until(lambda: not connector.available)
        assert connector.hint(chain_of("away", 2), Hint(done=True)) == 0


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
