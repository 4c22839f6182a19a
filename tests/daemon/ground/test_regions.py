"""The thread that makes the arena."""

from __future__ import annotations

import pytest

from tiercache.daemon.ground import regions
from tiercache.daemon.ground.regions import RegionMaker


def test_the_daemon_ends_if_the_thread_of_the_arena_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it all stores would be dropped, and nothing would say why."""

    def fail(size_bytes: int, name: str) -> int:
        raise ValueError("a surprise")

    monkeypatch.setattr(regions, "create_region", fail)
    ended: list[str] = []
    maker = RegionMaker(4 << 20, 2 << 20, "off", lambda region, fd: pytest.fail("no region was made"), ended.append)
    maker.start()
    maker.join(60)
    assert ended == ["the arena cannot be made: ValueError: a surprise"]
