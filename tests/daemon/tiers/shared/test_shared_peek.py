"""What a peek says of blocks in the shared store: apart from those on NVMe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from waiting import wait_until

import tiercache
from tiercache.http.peeking import ModelBlocks, ModelsKnown
from tiercache.http.query import Query
from tiercache.protocol.messages import ModelCard, Peek, Peeked

BLOCK_BYTES = 16 << 10
BLOCKS = 10
SPEC = tiercache.NamespaceSpec(engine="test/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES)
KEYS = tiercache.KeyChain(bytes(16), 4, range(4 * BLOCKS)).packed()


def connect(daemon: tiercache.LaunchedDaemon) -> tiercache.Connector:
    pool = tiercache.Pool.from_blocks(np.zeros((BLOCKS, BLOCK_BYTES), np.uint8))
    return tiercache.connect(daemon.address, namespace=SPEC, pool=pool)


def test_a_peek_tells_the_shared_store_from_nvme(tmp_path: Path) -> None:
    store: dict[str, Any] = {"shared": f"file://{tmp_path}/store", "shared_plain": True, "shared_lookup_timeout": "1s"}
    (tmp_path / "store").mkdir()
    with (
        tiercache.launch("16MiB", run_dir=tmp_path / "a", **store) as first,
        tiercache.launch("16MiB", run_dir=tmp_path / "b", **store) as second,
    ):
        giver, taker = connect(first), connect(second)
        giver.store(KEYS, range(BLOCKS))
        wait_until(lambda: giver.client.stats()["tiers"]["shared"]["written_blocks"] == BLOCKS, "the store has them")
        taker.store(KEYS[: 3 * 16], range(3))
        found: list[tiercache.Match] = []

        def finds_all() -> bool:
            found.append(taker.match(KEYS))
            taker.release(found[-1])
            return found[-1].shared_blocks == 7

        wait_until(finds_all, "a look-up in the store")
        assert (found[-1].blocks, found[-1].below_blocks) == (10, 7)
        number = taker.client.session().namespace_id(SPEC)
        peeked = taker.client.session().call(Peek, Peeked, namespaces=[number], keys=KEYS)
        for one in (giver, taker):
            one.close()
    assert (peeked.dram_blocks + peeked.below_blocks, peeked.each) == (10, [(peeked.dram_blocks, peeked.below_blocks)])
    assert peeked.shared_blocks == peeked.below_blocks == peeked.each_shared[0]


class _Session:
    """A daemon that answers a peek with this."""

    def __init__(self, answer: Peeked) -> None:
        self._answer = answer

    def call(self, kind: Any, reply: Any, **fields: Any) -> Peeked:
        return self._answer


def _answer(peeked: Peeked) -> dict[str, Any]:
    card = ModelCard(["demo"], bytes(16), [SPEC.fingerprint()], 4)
    known = ModelsKnown(_Session(peeked), 0.0, [card], {SPEC.fingerprint(): 7}, {})  # type: ignore[arg-type]
    return ModelBlocks(known, card, Query(model="demo", salt="", tokens=list(range(40)))).chain(list(range(40)))


def test_an_affinity_query_says_what_is_in_the_shared_store() -> None:
    answer = _answer(Peeked(0, 0, 3, 7, [(3, 7)], 5, [5]))
    assert answer["matched"] == 40
    assert answer["matched_tokens"] == {"dram": 12, "nvme": 8, "shared": 20}
    assert answer["namespaces"] == [{"fingerprint": SPEC.fingerprint(), "dram": 12, "nvme": 8, "shared": 20}]
