"""A write lease: renewed while blocks are copied, and ended once, by a commit or by giving it up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiercache.connector.blocks import Blocks, NewBlocks
from tiercache.connector.write_lease import WriteLease
from tiercache.copies.pool import CopyLost, Limit
from tiercache.errors import DeadlineExceeded
from tiercache.protocol.messages import NO_LEASE, EventRun


class Rig:
    """A session and a client's leases that record what is done with lease 7."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.notes: list[Any] = []
        leases: Any = SimpleNamespace(
            keep=lambda session, lease, ttl_ms, holder, writing: self.notes.append(("keep", lease, writing)),
            let_go=lambda lease: self.notes.append(("let go", lease)),
        )
        session: Any = SimpleNamespace(
            call=self._call, give_back=lambda request, **fields: self.notes.append(("later", fields))
        )
        self.lease = WriteLease(leases, session, 7)
        self.none = WriteLease(leases, session, NO_LEASE)

    def _call(self, request: Any, expect: Any, **fields: Any) -> None:
        if not self.answers:
            raise DeadlineExceeded("no answer")
        self.notes.append(("now", fields))


@pytest.mark.parametrize("answers", [True, False])
def test_a_lease_is_given_up_once_now_or_when_the_daemon_answers(answers: bool) -> None:
    rig = Rig(answers)
    with rig.lease:
        pass
    rig.lease.give_up()
    rig.lease.give_up()
    rig.none.give_up()
    end = "now" if answers else "later", {"lease": 7, "finished": True}
    assert rig.notes == [("keep", 7, True), ("let go", 7), end]


def test_a_lease_that_was_committed_is_not_given_up() -> None:
    rig = Rig()
    with rig.lease:
        rig.lease.committed()
    rig.lease.give_up()
    assert rig.notes == [("keep", 7, True), ("let go", 7)]


@pytest.mark.parametrize(("error", "finished"), [(CopyLost("it hangs"), False), (DeadlineExceeded("late"), True)])
def test_only_a_lost_copy_may_still_write_to_the_frames(error: Exception, finished: bool) -> None:
    rig = Rig()
    with pytest.raises(type(error)), rig.lease:
        raise error
    rig.lease.give_up()
    assert rig.notes[-1] == ("now", {"lease": 7, "finished": finished})


def test_a_part_of_blocks_keeps_their_places_in_the_chain() -> None:
    limit = Limit()
    part = Blocks(np.arange(10, 16), 3, limit, "mark").part(2, 4)
    assert (part.ids.tolist(), part.first, part.limit, part.after) == ([12, 13], 5, limit, "mark")
    assert len(part.part(1, 9)) == 1
    assert part.part(0, 2) is part
    assert len(part.part(0, 0)) == 0


def test_a_part_of_new_blocks_is_named_by_its_own_keys_and_events() -> None:
    keys = bytes(range(96))  # six blocks
    events = EventRun([bytes([number]) for number in range(4)], b"", [])
    window = NewBlocks(np.arange(4), 2, Limit(), None, keys, events).part(1, 3)
    fields = window.reserve_fields(9, 100)
    assert (fields["namespace"], fields["ttl_ms"]) == (9, 100)
    assert (fields["parent"], fields["keys"]) == (keys[32:48], keys[48:80])
    assert fields["events"].hashes == events.hashes[1:3]
    first = NewBlocks(np.arange(1), 0, Limit(), keys=keys).reserve_fields(9, 100)
    assert (first["parent"], first["keys"], first["events"]) == (b"", keys[:16], None)
