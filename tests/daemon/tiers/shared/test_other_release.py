"""Values of another release's form: misses of their own kind, no damage, and replaced as bad ones are."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from chains import chain_of
from host_rig import host
from memory_store import MemoryStore
from played import played

from tiercache.cli.doctor.hits import _shared as shared_findings
from tiercache.daemon.tiers.shared import presence
from tiercache.daemon.tiers.shared.value import HEADER_BYTES, MAGIC, VERSION

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_what_another_release_stored_is_no_damage(tmp_path: Path) -> None:
    for pack in (1, 4):
        store = MemoryStore(pack)
        a, b = host(store, tmp_path, f"a{pack}"), host(store, tmp_path, f"b{pack}")
        chain = chain_of("x", 8)
        a.store(a.namespace(), chain)
        await a.sent()
        newer = MAGIC + bytes([VERSION + 1])
        for name, value in store.values.items():
            store.values[name] = value.replace(MAGIC + bytes([VERSION]), newer)
            assert len(value) > pack * HEADER_BYTES
        assert await b.load([b.namespace()], chain) == 0
        stats = b.shared.stats()
        assert stats["bad_blocks"] == 0
        assert stats["other_version_blocks"] >= 1
        (finding,) = shared_findings({"tiers": {"shared": stats}})
        assert "upgrade all hosts" in str(finding)
        for one in (a, b):
            one.check()
            await one.close()


@pytest.mark.parametrize("place", [len(MAGIC), len(MAGIC) + 1], ids=["another release", "damage"])
@played
async def test_a_block_that_is_computed_much_later_replaces_the_value_that_was_bad(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prefill takes longer than a bad block is not claimed for."""
    monkeypatch.setattr(presence, "UNFETCHABLE_S", 0.0)
    store = MemoryStore()
    a, b, c = (host(store, tmp_path, name) for name in "abc")
    chain = chain_of("x", 20)
    a.store(a.namespace(), chain)
    await a.sent()
    for name, value in store.values.items():
        store.values[name] = value[:place] + b"\xee" + value[place + 1 :]
    assert await b.load([b.namespace()], chain) == 0
    b.store(b.namespace(), chain)
    await b.sent()
    assert (b.shared.stats()["written_blocks"], b.shared.stats()["there_blocks"]) == (20, 0)
    assert await c.load([c.namespace()], chain) == 20
    for one in (a, b, c):
        one.check()
        await one.close()


@played
async def test_a_value_that_turns_out_bad_while_a_store_of_it_is_under_way_is_replaced(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 1)
    a.store(a.namespace(), chain)
    await a.sent()
    looked, go_on = threading.Event(), threading.Event()

    def before(call: str) -> None:
        if call == "exists":
            looked.set()
            go_on.wait(60)

    store.before = before
    space = b.namespace()
    b.store(space, chain)
    await b.until(looked.is_set)
    known = b.shared.presence
    known.could_not_fetch(space, chain, known.generation(space), bad=True)
    go_on.set()
    await b.until(lambda: b.shared.stats()["written_blocks"] == 1)
    await b.sent()
    assert known.has(space, chain)
    for one in (a, b):
        one.check()
        await one.close()
