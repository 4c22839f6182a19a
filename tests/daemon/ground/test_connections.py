"""Which of too many peers has to go, by what ZeroMQ tells of their coming and going."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import zmq

from tiercache.daemon.ground import connections
from tiercache.daemon.ground.connections import HANDSHAKE_MS, Connections

FIRST = 1 << 20
"""Numbers of files that this process does not have: to shut one down does nothing."""
CAME, LEFT = zmq.EVENT_ACCEPTED, zmq.EVENT_CLOSED


class Told:
    """At most three connections, and a pipe whose events are said here."""

    def __init__(self, socket: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.events: list[tuple[int, int]] = []
        self.refused: list[int] = []
        self.ours = Connections(socket, 3)
        self._pipe = self.ours._monitor
        monkeypatch.setattr(connections.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(connections.os, "dup", self._dup)

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.events:
            raise zmq.Again
        event, number = self.events.pop(0)
        return [struct.pack("=hi", event, FIRST + number), b"endpoint"]

    def _dup(self, fd: int) -> int:
        self.refused.append(fd - FIRST)
        raise OSError("gone")

    def say(self, *events: tuple[int, int]) -> None:
        """Let it see these events, and none after them."""
        self.events += events
        self.ours._monitor = self  # type: ignore[assignment]
        try:
            assert not self.ours.look()
        finally:
            self.ours._monitor = self._pipe

    def heard(self, number: int) -> None:
        self.ours.heard(FIRST + number)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        told = Told(socket, monkeypatch)
        assert socket.getsockopt(zmq.HANDSHAKE_IVL) == HANDSHAKE_MS, "else a silent peer would stay"
        yield told
        told.ours.close()


def test_the_oldest_that_may_not_have_shaken_hands_goes(told: Told) -> None:
    told.say(*((CAME, number) for number in range(5)))
    assert told.refused == [0, 1]
    assert told.ours.refused == 2
    assert told.ours.count == 3


def test_one_that_lives_for_longer_than_a_handshake_stays(told: Told) -> None:
    told.say((CAME, 0))
    told.now_s = HANDSHAKE_MS / 1000 + 1
    told.say((CAME, 1), (CAME, 2), (CAME, 3))
    assert told.refused == [1]


def test_what_was_heard_says_nothing_of_a_later_peer_with_that_number(told: Told) -> None:
    told.heard(0)
    told.say((CAME, 0))
    told.say((LEFT, 0), (CAME, 0))
    told.say((CAME, 1), (CAME, 2), (CAME, 3))
    assert told.refused == [0]


def test_the_newest_goes_where_all_others_have_shaken_hands(told: Told) -> None:
    for number in range(3):
        told.heard(number)
    told.say(*((CAME, number) for number in range(4)))
    assert told.refused == [3]


def test_those_that_leave_take_no_place(told: Told) -> None:
    told.say(*((CAME, number) for number in range(4)))
    assert told.refused == [0], "which ZeroMQ has not closed yet"
    told.say((LEFT, 1), (CAME, 4))
    assert told.refused == [0]
    told.say((LEFT, 0), (CAME, 5))
    assert told.refused == [0, 2]
