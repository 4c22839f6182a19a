"""The search for the longest stored run: exact where the store has a prefix, careful where it has holes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercache.daemon.tiers.shared.search import SAMPLED, ChainAsk, Probe, StoredRun, WindowAsk, longest_run


def run(
    asks: list[ChainAsk | WindowAsk], blocks: int, stored: set[Probe], pack: int = 1
) -> tuple[StoredRun, list[int]]:
    """The outcome, and how many probes each round had. Probes of chains are numbers of packs."""
    rounds, sizes = longest_run(asks, blocks, pack), list[int]()
    try:
        probes = next(rounds)
        while True:
            sizes.append(len(probes))
            probes = rounds.send([probe in stored for probe in probes])
    except StopIteration as end:
        return end.value, sizes


@given(st.integers(1, 9000), st.data())
def test_a_stored_prefix_is_found_exactly(blocks: int, data: st.DataObject) -> None:
    length, start = data.draw(st.integers(0, blocks)), data.draw(st.integers(0, blocks))
    found, sizes = run([ChainAsk(start)], blocks, {(0, number) for number in range(length)})
    assert found.end == max(start, length)
    assert len(sizes) <= 4, "three rounds and a sample"
    assert sum(sizes) <= 1 + 3 * 32 + SAMPLED


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 16))
def test_the_store_is_asked_for_the_block_that_is_fetched_first(more: int, start: int, pack: int) -> None:
    """So what it says of it can be held against it."""
    rounds = longest_run([ChainAsk(start)], start + more + pack, pack)
    assert next(rounds)[0] == (0, start // pack)


@given(st.integers(1, 600), st.sets(st.integers(0, 599)), st.integers(0, 600))
def test_with_holes_it_claims_no_more_than_the_last_block(blocks: int, stored: set[int], start: int) -> None:
    start = min(start, blocks)
    found, _ = run([ChainAsk(start)], blocks, {(0, number) for number in stored})
    assert start <= found.end <= blocks
    assert found.end == start or found.end - 1 in stored
    if blocks - start <= 32:
        whole = next((number for number in range(start, blocks) if number not in stored), blocks)
        assert found.end == whole, "all of it was probed"


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=8), st.integers(1, 16))
def test_ranks_together_and_packs(ranks: list[tuple[int, int]], pack: int) -> None:
    """Each rank has some blocks on this host, and a prefix in the store. What several have together is whole packs."""
    if len(ranks) > 1:
        ranks = [(start // pack * pack, length) for start, length in ranks]
    asks: list[ChainAsk | WindowAsk] = [ChainAsk(start) for start, _ in ranks]
    stored = {(place, number) for place, (_, length) in enumerate(ranks) for number in range(length // pack)}
    found, _ = run(asks, 300, stored, pack)
    assert found.end == min(max(start, length // pack * pack) for start, length in ranks)


@given(
    st.integers(1, 60), st.integers(1, 12), st.sets(st.integers(0, 59)), st.sets(st.integers(0, 59)), st.integers(0, 60)
)
def test_a_cut_has_a_whole_window(blocks: int, window: int, here: set[int], stored: set[int], chain: int) -> None:
    chain = min(chain, blocks)
    mine = bytes(number in here for number in range(blocks))
    probes = {(0, number) for number in range(chain)} | {(1, number) for number in stored}
    found, _ = run([ChainAsk(0), WindowAsk(window, mine)], blocks, probes)
    assert found.end <= chain
    needed = range(max(0, found.end - window), found.end)
    assert all(number in here or number in found.stored.get(1, ()) for number in needed)
    assert all(number in stored for number in found.stored.get(1, ()))


def test_a_window_that_is_not_whole_shortens_the_cut() -> None:
    probes = {(0, number) for number in range(20)} | {(1, number) for number in range(20) if number != 15}
    found, _ = run([ChainAsk(0), WindowAsk(6, bytes(20))], 20, probes)
    assert found.end == 15, "block 15 rules out the cuts at 16 to 21"
