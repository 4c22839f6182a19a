"""Large copies by two threads: every byte, the leading count of a stopped one, and Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tiercache.copies import memcpy
from tiercache.copies.memcpy import Move, copy_moves

Bytes = npt.NDArray[np.uint8]
BLOCK = 3000
BLOCKS = 40


@pytest.fixture(autouse=True)
def small_pieces_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcpy, "PIECE_BYTES", 1000)
    monkeypatch.setattr(memcpy, "SHARED_FROM_BYTES", 1)
    monkeypatch.setattr(memcpy, "_second_core", lambda: True)


class Moves(list[Move]):
    """The moves of so many blocks from a source to a target in reverse order.

    Moves are bare addresses, so the list itself keeps both arrays alive: a copy into freed memory breaks whatever
    test comes next.
    """

    def __init__(self) -> None:
        self.source: Bytes = np.random.default_rng(1).integers(1, 256, (BLOCKS, BLOCK), np.uint8)
        self.target: Bytes = np.zeros_like(self.source)
        first, last = self.source.ctypes.data, self.target.ctypes.data + (BLOCKS - 1) * BLOCK
        super().__init__((last - block * BLOCK, first + block * BLOCK, BLOCK) for block in range(BLOCKS))

    def check(self, complete: int = BLOCKS) -> None:
        """Check that the first `complete` blocks have arrived, byte for byte."""
        np.testing.assert_array_equal(self.target[::-1][:complete], self.source[:complete])


def never() -> bool:
    return False


class Meeting:
    """Answers no until both threads have asked, which shows that both take part."""

    def __init__(self, then: Callable[[], bool] = never) -> None:
        self.both = threading.Barrier(2)
        self.known: set[int] = set()
        self.then = then

    def __call__(self) -> bool:
        if threading.get_ident() not in self.known:
            self.known.add(threading.get_ident())
            self.both.wait(60)
            return False
        return self.then()


def test_both_threads_take_part_and_every_byte_arrives() -> None:
    moves = Moves()
    meeting = Meeting()
    assert copy_moves(moves, meeting, shared=True) == BLOCKS
    assert len(meeting.known) == 2
    moves.check()


@pytest.mark.parametrize("questions", [0, 1, 2, 5, 30, 100])
def test_the_moves_before_the_count_are_complete_when_stopped(questions: int) -> None:
    moves = Moves()
    left = iter(range(questions))
    complete = copy_moves(moves, Meeting(lambda: next(left, None) is None), shared=True)
    assert complete < BLOCKS
    moves.check(complete)
    assert complete >= (questions - 2) // 3  # three pieces a block, asked before each but the first


def test_an_interrupted_copy_is_over_before_its_caller_is_told() -> None:
    moves = Moves()
    caller, raised = threading.get_ident(), threading.Event()

    def interrupt() -> bool:
        if threading.get_ident() == caller:
            raised.set()
            raise KeyboardInterrupt
        return not raised.wait(60)

    with pytest.raises(KeyboardInterrupt):
        copy_moves(moves, Meeting(interrupt), shared=True)
    before = moves.target.copy()
    again = Moves()
    assert copy_moves(again, Meeting(), shared=True) == BLOCKS  # by both: the helper has left the first
    again.check()
    np.testing.assert_array_equal(moves.target, before)
