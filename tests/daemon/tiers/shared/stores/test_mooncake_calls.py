"""How Mooncake's store calls its client, without Mooncake: threads that step behind others, several values at once."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from counting_store import COUNTS
from store_calls import content, put, read, soon

from tiercache.daemon.tiers.shared.stores.helper.store import HelperStore
from tiercache.daemon.tiers.shared.stores.mooncake import store as mooncake_store
from tiercache.daemon.tiers.shared.stores.mooncake.client import MooncakeClient
from tiercache.daemon.tiers.shared.stores.mooncake.connection import (
    VALUES_TOGETHER,
    WAITING_NICENESS,
    MooncakeConnection,
)
from tiercache.daemon.tiers.shared.stores.mooncake.settings import MooncakeSettings
from tiercache.daemon.tiers.shared.stores.store import Fate


def niceness() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class _Native:
    """Has no value."""

    def __init__(self) -> None:
        self.niceness: list[int] = []

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.niceness.append(niceness())
        return [0] * len(keys)


class _Started(MooncakeClient):
    def __init__(self, native: _Native) -> None:
        super().__init__(MooncakeSettings(master="nowhere"))
        self._native: Any = native


def test_threads_that_wait_for_transfers_step_behind_those_that_transfer() -> None:
    native, before = _Native(), niceness()

    def call() -> None:
        MooncakeConnection(_Started(native)).exists([b"a"], [], soon())

    def call_from_behind() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        call()

    for target in (call, call_from_behind):
        calling = threading.Thread(target=target)
        calling.start()
        calling.join(30)
    assert native.niceness == [max(before, WAITING_NICENESS), 19]
    assert niceness() == before, "only the thread that calls"


def test_several_values_are_put_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_store, "check_library", lambda address: None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parent)]))
    real = HelperStore.__init__

    def counting(store: HelperStore, maker: str, url: str, *rest: Any, **more: Any) -> None:
        real(store, "counting_store:CountingStore", f"obedient://{tmp_path}", *rest, **more)

    monkeypatch.setattr(HelperStore, "__init__", counting)
    store = mooncake_store.pooled_memory("mooncake://master")
    line = store.connect()
    try:
        values = {b"%d" % number: content(number, 2 << 20) for number in range(12)}
        assert set(put(line, values)) == {Fate.DONE}
        assert read(line, list(values), body_bytes=2 << 20) == list(values.values())
        (counts,) = read(line, [COUNTS], head_bytes=0)
        assert isinstance(counts, bytes)
        assert sum(counts) == 12
        assert max(counts) == VALUES_TOGETHER
        assert len(counts) <= 6
    finally:
        line.close()
        store.close()
