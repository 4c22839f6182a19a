"""What all eviction policies owe the index, checked on those of the daemon."""

from __future__ import annotations

import pytest
from policy_rules import first_to_go_of_an_earlier_life, keeps_the_index_whole

from tiercache.daemon.policies import POLICIES


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_index_stays_whole_whatever_happens(policy: str, seed: int) -> None:
    keeps_the_index_whole(POLICIES[policy], seed)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_an_earlier_life_go_as_others_do(policy: str) -> None:
    assert first_to_go_of_an_earlier_life(POLICIES[policy]) == 9, "the last block of the oldest chain"
