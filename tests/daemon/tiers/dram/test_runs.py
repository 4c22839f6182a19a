"""Look-ups that take several slices: bounded, one consistent answer, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_rig import FRAME_BYTES, CacheRig, counted, fill, in_slices
from raw_client import Client, block_of, new_chain

from tiercache.daemon.ground.slices import PINS
from tiercache.daemon.index.index import Index
from tiercache.daemon.tiers.dram.space import Namespace

WINDOW = 3000


def windowed(h: CacheRig, blocks: int = WINDOW, rank: int = 0) -> tuple[Namespace, bytes]:
    """A namespace with one whole window."""
    namespace = h.space(rank=rank, window_blocks=WINDOW)
    return namespace, fill(h, namespace, 1, blocks)


@pytest.mark.parametrize("ttl_s", [0, 10])
def test_a_wide_window_is_pinned_touched_and_let_go_in_slices(monkeypatch: pytest.MonkeyPatch, ttl_s: int) -> None:
    h = CacheRig(region_bytes=(WINDOW + 100) * FRAME_BYTES)
    namespace, keys = windowed(h)
    counts = [counted(monkeypatch, Index, name) for name in ("pin", "touch", "unpin")]
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, *(count() for count in counts))
        h.check()

    found, _ = in_slices(h.cache.reads.match(h.owner, [namespace], keys, ttl_s), look)
    assert found.dram == WINDOW
    if ttl_s:
        assert h.cache.reads.release(h.owner, found.lease.lease_id)
        look()
    while h.cache.work():
        look()
    assert 0 < most <= PINS
    h.check()
    assert not any(h.cache.space.index.pins[namespace.table.get(keys[at : at + 16])] for at in range(0, len(keys), 16))


def test_others_are_served_while_a_long_request_is_answered(client: Client, run_dir: Path) -> None:
    numbers = [client.namespace(window_blocks=1, tp_rank=rank, tp_size=4) for rank in range(4)]
    for number in numbers:
        client.store(number, new_chain(1), [block_of(0)])
    wanted = new_chain(1) * 65_536
    client.send("peek", numbers, wanted)
    client.send("ping")
    assert client.answer()[0] == "done"
    answer = client.answer()
    assert (answer[0], answer[3:6]) == ("peeked", [0, 0, [[0, 0]] * 4])
    # A client that has gone gets no answer, and nothing of its request stays.
    with Client(run_dir) as leaver:
        leaver.send("match", numbers, wanted, 1000)
        leaver.leave()
    assert client.ask("check")[1] == []
    # And no session may have more than a few of them under way.
    for _ in range(17):
        client.send("peek", numbers, wanted[: 16 * 16_384])
    answers = [client.answer() for _ in range(17)]
    assert sorted(answer[0] for answer in answers) == ["error"] + ["peeked"] * 16


def test_windows_of_too_many_blocks_are_refused(client: Client) -> None:
    numbers = [client.namespace(window_blocks=300, tp_rank=rank, tp_size=200) for rank in range(110)]
    assert client.refusal("match", numbers, new_chain(300), 0) == "too_large"
    assert client.refusal("pin", numbers, new_chain(300), 1000) == "too_large"
    assert client.refusal("prefetch", numbers, new_chain(300)) == "too_large"
    assert client.ask("match", numbers, new_chain(297), 0)[0] == "matched"


def test_lists_that_are_far_too_long_are_not_built(client: Client) -> None:
    numbers = [client.namespace()]
    assert client.refusal("renew", [1] * 65_537, 1000) == "malformed"
    assert client.ask("renew", [1] * 65_536, 1000)[0] == "renewed"
    assert client.refusal("match", numbers * 65_537, new_chain(1)) == "malformed"
    assert client.refusal("match", numbers * 257, new_chain(1)) == "bad_value"
    assert client.refusal("flush", "dram", numbers * 65_537, b"") == "malformed"


def test_many_leases_on_wide_windows_are_renewed_in_slices(client: Client) -> None:
    namespace, other = client.namespace(4096, window_blocks=WINDOW), client.namespace(4096)
    keys = new_chain(WINDOW)
    for first in range(0, WINDOW, 500):
        client.store(namespace, keys[16 * first : 16 * (first + 500)], [block_of(1, 4096)] * 500)
    leases = [client.match([namespace], keys)[1] for _ in range(8)]
    assert all(leases)
    client.send("renew", [*leases, 1], 60_000)
    client.send("flush", "all", [other], b"")
    answers = {answer[0]: answer for answer in (client.answer(), client.answer())}
    assert answers.keys() == {"flushed", "renewed"}, "the order depends on when the second request came"
    assert answers["renewed"][3] == bytes([1] * 8 + [0])
    assert all(map(client.release, leases))
