"""A connection to a real Valkey server that is stopped and goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store_calls import content
from valkey_rig import ValkeyServer, connect, got, new_get, new_put, soon

from tiercache.daemon.tiers.shared.stores.store import (
    StoreError,
    StoreProblem,
)

pytestmark = pytest.mark.stress

MIB = 1 << 20


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def problem_of(call: object) -> StoreProblem:
    assert callable(call)
    with pytest.raises(StoreError) as caught:
        call()
    assert "\n" not in caught.value.text
    return caught.value.problem


def test_stopped_and_going_on(valkey: ValkeyServer) -> None:
    """Every call ends at its deadline; no late answer reaches a later call."""
    connection = connect(valkey.url)
    fresh = connect(valkey.url)
    value, other = content(1, 2 * MIB), content(2, 2 * MIB)
    connection.put([new_put(b"one", value), new_put(b"two", other)], [], soon())
    valkey.stop()
    try:
        for waiting in (connection, fresh):
            for call in (
                lambda line: line.get([new_get(b"one", 2 * MIB)], [b"note"], soon(0.2)),
                lambda line: line.exists([b"one"], [b"note"], soon(0.2)),
                lambda line: line.put([new_put(b"new", value) for _ in range(40)], [], soon(0.2)),
                lambda line: line.delete([b"nothing"], soon(0.2)),
                lambda line: line.set_note(b"nothing", b"", soon(0.2)),
            ):
                begun_s = soon(0)
                assert problem_of(lambda call=call, line=waiting: call(line)) is StoreProblem.TIMEOUT
                assert soon(0) - begun_s < 10.0
    finally:
        valkey.go_on()
    for waiting in (connection, fresh):
        get = new_get(b"two", 2 * MIB)
        waiting.get([get], [], soon())
        assert got(get) == other
        waiting.close()
