"""How far requests go ahead of their replies."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from tiercache.daemon.tiers.shared.stores.valkey.commands import ShortCommand
from tiercache.daemon.tiers.shared.stores.valkey.exchange import Exchange, PipelineWindow


class Asked(ShortCommand):
    def read(self, first: bytes, line: Any) -> None:
        assert first == b"+OK"


class Line:
    """A server that answers when it is asked for a reply."""

    def __init__(self) -> None:
        self.requests: deque[bytes] = deque()
        self.most_under_way = self.answered = 0

    def send(self, parts: list[bytes]) -> None:
        self.requests += parts
        self.most_under_way = max(self.most_under_way, len(self.requests))

    def read_line(self) -> bytes:
        self.answered += 1
        self.requests.popleft()
        return b"+OK"


@pytest.mark.parametrize(
    ("request_bytes", "reply_bytes", "most"), [(30, 1, 3), (25, 1, 4), (1, 20, 2), (1, 25, 2), (150, 1, 1), (1, 60, 1)]
)
def test_no_more_is_under_way_than_the_window_holds_or_one_command(
    request_bytes: int, reply_bytes: int, most: int
) -> None:
    line: Any = Line()
    commands = [Asked(b"", bytes(request_bytes), reply_bytes) for _ in range(20)]
    Exchange(line, commands, PipelineWindow(request_bytes=100, reply_bytes=50)).run()
    assert (line.most_under_way, line.answered) == (most, 20)
