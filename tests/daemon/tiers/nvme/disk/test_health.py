"""Writing pauses after a failure."""

from __future__ import annotations

from tiercache.daemon.tiers.nvme.disk.health import WriteHealth


def test_writing_pauses_longer_after_each_failure() -> None:
    now = [0.0]
    health = WriteHealth("a disk", lambda: now[0])
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert health.may_write
        health.failed("EIO")
        health.failed("EIO")  # was already under way: it counts, and changes nothing
        health.worked()
        assert not health.may_write
        now[0] += pause_s - 0.5
        assert not health.may_write
        now[0] += 0.5
    assert health.failures == 16
    health.worked()
    assert health.reason == ""
    health.failed("EIO")
    now[0] += 1
    assert health.may_write
