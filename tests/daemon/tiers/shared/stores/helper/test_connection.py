"""Calls by way of a helper process, to a folder and to a store that obeys: what goes in comes out."""

from __future__ import annotations

import pytest
from helper_rig import Make
from store_calls import put, read, soon

from tiercache.daemon.tiers.shared.stores.helper import messages
from tiercache.daemon.tiers.shared.stores.store import Fate, Put, StoreError, StoreProblem


def test_an_error_of_the_store_comes_back_and_the_line_is_used_again(make: Make) -> None:
    line = make().connect()
    values = [Put(b"%d" % number, [b"value!"]) for number in range(3)]
    values[2:2] = [Put(b"full", [b"value!"])]
    values += [Put(b"later%d" % number, [b"value!"]) for number in range(40)]
    with pytest.raises(StoreError, match="there is no room: make some") as caught:
        line.put(values, [], soon())
    assert caught.value.problem is StoreProblem.FULL
    assert [one.fate for one in values[:3]] == [Fate.DONE, Fate.DONE, Fate.UNKNOWN]
    assert values[-1].fate is Fate.UNKNOWN
    first = line._line
    assert read(line, [b"0"]) == [b"value!"]
    assert line._line is first


@pytest.mark.parametrize("length", [3, 16, 1 << 40])
def test_an_answer_that_cannot_be_true_is_a_misfit(make: Make, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A process that has gone mad may say that it has read more than there is room for, or less than the head."""
    line = make().connect()
    put(line, {b"a": b"0123456789"})
    real = messages.decode_answered

    def mad(packet: bytes) -> messages.Answered:
        answer: messages.Answered = real(packet)
        if isinstance(answer, messages.Settled):
            return messages.Settled(answer.slot, answer.fate, length)
        return answer

    monkeypatch.setattr(messages, "decode_answered", mad)
    assert read(line, [b"a"], 5, 10) == [Fate.MISFIT]
