"""Fixtures of the tests of forks and signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from connector_helpers import daemon as daemon
from connector_helpers import open_connector as open_connector
from signals_at_steps import Terminated


@pytest.fixture
def handlers(ctrl_c: None) -> Iterator[dict[int, Any]]:
    """Handlers of SIGINT and SIGTERM that raise. They must still be installed when a test ends."""

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    earlier = signal.signal(signal.SIGTERM, terminate)
    mine: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    yield mine
    found = {number: signal.getsignal(number) for number in mine}
    signal.signal(signal.SIGTERM, earlier)
    assert found == mine
