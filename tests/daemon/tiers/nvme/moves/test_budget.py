"""The write budget: a bucket of two hours."""

from __future__ import annotations

from tiercache.daemon.tiers.nvme.moves.budget import WriteBudget


def test_the_budget_is_a_bucket_of_two_hours() -> None:
    now = [0.0]
    budget = WriteBudget(12 * 1000, lambda: now[0])  # a bucket of 1000 bytes
    assert budget.admits(400, asked_again=False)
    budget.charge(400)
    assert budget.admits(500, asked_again=False), "more than half is left"
    budget.charge(200)
    assert not budget.admits(100, asked_again=False)
    assert budget.admits(400, asked_again=True)
    assert not budget.admits(401, asked_again=True)
    budget.charge(400)
    assert budget.fullness == 0
    now[0] = 3600.0
    assert budget.fullness == 0.5
    now[0] = 10**9
    assert budget.fullness == 1
    assert budget.admits(5000, asked_again=True), "a block larger than the bucket goes when that is full"
    budget.charge(5000)
    assert not budget.admits(1, asked_again=True)
    assert WriteBudget(0).admits(1 << 50, asked_again=False)
