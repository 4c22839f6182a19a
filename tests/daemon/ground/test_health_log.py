"""The log of the daemon's health: a line for each change, and none for what lasts."""

from __future__ import annotations

import logging

import pytest

from tiercache.daemon.ground.health_log import HealthLog


def test_each_cause_is_told_once_and_so_is_the_end_of_all(caplog: pytest.LogCaptureFixture) -> None:
    its = HealthLog()
    disks = ["/mnt/nvme0: it has hung for {} s", "/mnt/nvme1: it has hung for {} s"]
    with caplog.at_level(logging.INFO):
        for second in range(10, 20):
            its.look([reason.format(second) for reason in disks], second)
        its.look([disks[1].format(20)], 20)
        its.look([], 25)
    assert caplog.messages == [
        "health: degraded: /mnt/nvme0: it has hung for 10 s",
        "health: degraded: /mnt/nvme1: it has hung for 10 s",
        "health: ok again, after 15 s",
    ]
