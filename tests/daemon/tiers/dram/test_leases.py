"""Deadlines of leases: all are found, and notes on former ones do not pile up."""

from __future__ import annotations

from tiercache.daemon.tiers.dram.leases import Deadlines, ReadLease


def test_notes_on_renewed_leases_do_not_pile_up_and_all_that_is_due_is_found() -> None:
    leases = {number: ReadLease(number, [], b"", 0, [], 0.0, 0.0) for number in range(2000)}
    deadlines = Deadlines(leases)
    for turn in range(20):
        for number, lease in leases.items():
            lease.deadline_s = 1000.0 * turn + number / 2
            deadlines.add(lease.deadline_s, number)
    assert len(deadlines) <= 4 * len(leases) + 2048
    assert set(deadlines.due(19_049.5)) >= set(range(100))
    assert set(deadlines.due(1e9)) >= set(range(100, 2000))
