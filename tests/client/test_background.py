"""Small background jobs: done in order, even if one fails, and until the worker is closed."""

from __future__ import annotations

import threading

import pytest

from tiercache.connector.jobs import Background


def test_all_is_done_in_order_though_some_of_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    background, done = Background("test"), []
    background.later(lambda: done.append(1))
    background.later(lambda: 1 / 0)
    background.later(lambda: done.append(2))
    assert done == []
    assert background.finish(30)
    assert done == [1, 2]
    assert "nobody foresaw" in caplog.text
    background.close()


def test_finish_waits_no_longer_than_it_is_told() -> None:
    background, gate = Background("test"), threading.Event()
    background.later(lambda: gate.wait(30))
    assert not background.finish(0.01)
    gate.set()
    assert background.finish(30)
    background.later(gate.clear)
    background.close()
    assert not gate.is_set()
    assert background.finish(30)
    background.later(gate.set)
    assert not background.finish(30), "nobody is there to do it"
