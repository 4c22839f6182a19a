"""Helper processes that a test hangs, stops and kills, and calls that meet them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from waiting import wait_until

from tiercache.daemon.tiers.shared.stores.helper.connection import HelperStore
from tiercache.daemon.tiers.shared.stores.store import Connection, StoreError, StoreProblem

LATE_S = 0.2

Make = Callable[..., HelperStore]
"""Makes a store whose process ends with the test: see the fixture `make`."""


def pid(store: HelperStore) -> int:
    """Of the store's process, once it serves."""
    store.supervisor.begin()
    wait_until(lambda: store.stats()["ready"], "the helper process")
    found = store.stats()["pid"]
    assert isinstance(found, int)
    return found


def late() -> float:
    return time.monotonic() + LATE_S


def hang(line: Connection, name: bytes = b"hang") -> None:
    """A call that does not come back, up to its deadline."""
    with pytest.raises(StoreError) as caught:
        line.exists([name], [], late())
    assert caught.value.problem is StoreProblem.TIMEOUT


def problem_of(call: Callable[[], object]) -> StoreError | None:
    """What the call raises, if it does."""
    try:
        call()
    except StoreError as error:
        return error
    return None


def patiently(call: Callable[[], object]) -> None:
    """Call until the store is there again."""

    def answered() -> bool:
        error = problem_of(call)
        assert error is None or error.problem in (StoreProblem.UNREACHABLE, StoreProblem.BUSY)
        return error is None

    wait_until(answered, "a call that succeeds")
