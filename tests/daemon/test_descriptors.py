"""The limit of descriptors: what the daemon admits so that the limit is never reached, and what it refuses."""

from __future__ import annotations

import dataclasses
import logging
import resource

import pytest

from tiercache.config.daemon_config import DaemonConfig
from tiercache.daemon.descriptors import fit, needed, raise_limit
from tiercache.errors import ConfigError

CONFIG = DaemonConfig(arena_bytes=64 << 20, region_bytes=2 << 20, max_sessions=100)


def _needs(config: DaemonConfig) -> int:
    """The smallest limit that leaves the settings as they are."""
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high) // 2
        try:
            enough = fit(config, middle) == config
        except ConfigError:
            enough = False
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def test_fewer_clients_are_let_in_where_there_are_fewer_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    enough = _needs(CONFIG)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert fit(CONFIG, enough) == CONFIG
        assert not caplog.records
        fitted = fit(CONFIG, enough - 1)
    assert fitted == dataclasses.replace(CONFIG, max_sessions=99)
    (line,) = caplog.messages
    assert f"99 instead of 100, since this process may open {enough - 1} files: raise the limit to {enough} " in line
    assert needed(99, regions=32) <= enough - 1


def test_too_few_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=f"may open 1000 files.*raise the limit to {_needs(CONFIG)} .ulimit"):
        fit(CONFIG, 1000)
    assert fit(dataclasses.replace(CONFIG, max_sessions=1), needed(1, regions=32)).max_sessions == 1


def test_the_soft_limit_becomes_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert raise_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
